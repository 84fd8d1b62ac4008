// The forward pass of a decoder with CoPE, in plain JavaScript: `cope_jax.models.decoder` with
// pre-norm LayerNorm, the tanh form of GELU and biases. Sums are in float64, stored values in float32.

// The tensors of a safetensors file, by name: {values, shape}.
export function readTensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true)), begin = 8 + size;
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  delete header.__metadata__;
  return Object.fromEntries(Object.entries(header).map(([name, { shape, data_offsets: [from, to] }]) =>
    [name, { shape, values: new Float32Array(buffer.slice(begin + from, begin + to)) }]));
}

function transposed(matrix, rows, columns) {
  const result = new Float32Array(matrix.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) result[j * rows + i] = matrix[i * columns + j];
  return result;
}

// Row r of y, from row `from` up to `to`, is W x_r + b. W is [outputs, inputs]. Four rows and two outputs at a
// time, so that a number that is read is used more than once.
function linear(x, { weight, bias, inputs, outputs }, y, from, to) {
  for (let r = from; r < to; r += 4) {
    // The last rows may be the same, so that there are always four.
    const r1 = Math.min(r + 1, to - 1), r2 = Math.min(r + 2, to - 1), r3 = Math.min(r + 3, to - 1);
    const x0 = r * inputs, x1 = r1 * inputs, x2 = r2 * inputs, x3 = r3 * inputs;
    for (let o = 0; o < outputs; o += 2) {
      const p = Math.min(o + 1, outputs - 1), w0 = o * inputs, w1 = p * inputs, b0 = bias?.[o] ?? 0, b1 = bias?.[p] ?? 0;
      let a0 = b0, a1 = b0, a2 = b0, a3 = b0, c0 = b1, c1 = b1, c2 = b1, c3 = b1;
      for (let i = 0; i < inputs; i++) {
        const u = weight[w0 + i], v = weight[w1 + i], s0 = x[x0 + i], s1 = x[x1 + i], s2 = x[x2 + i], s3 = x[x3 + i];
        a0 += u * s0; a1 += u * s1; a2 += u * s2; a3 += u * s3;
        c0 += v * s0; c1 += v * s1; c2 += v * s2; c3 += v * s3;
      }
      y[r * outputs + o] = a0; y[r1 * outputs + o] = a1; y[r2 * outputs + o] = a2; y[r3 * outputs + o] = a3;
      y[r * outputs + p] = c0; y[r1 * outputs + p] = c1; y[r2 * outputs + p] = c2; y[r3 * outputs + p] = c3;
    }
  }
}

const SCALE = Math.sqrt(2 / Math.PI);
const gelu = x => x / 2 * (1 + Math.tanh(SCALE * (x + 0.044715 * x * x * x)));

export class Decoder {
  // `config` is the content of a model's config.json, `capacity` the largest number of tokens.
  constructor(buffer, { model }, capacity = 256) {
    const tensors = readTensors(buffer), { block } = model;
    const stacked = (name, layer) => {
      const { shape, values } = tensors[`blocks.${name}`], size = values.length / shape[0];
      return { shape: shape.slice(1), values: values.subarray(layer * size, (layer + 1) * size) };
    };
    const dense = (name, layer) => {
      const { shape: [inputs, outputs], values } = stacked(`${name}.kernel`, layer);
      return { weight: transposed(values, inputs, outputs), bias: stacked(`${name}.bias`, layer).values, inputs, outputs };
    };
    const norm = get => ({ scale: get("scale"), bias: get("bias") });
    const rows = width => new Float32Array(capacity * width);
    this.heads = block.num_heads; this.width = block.model_dim; this.epsilon = block.norm_epsilon;
    this.capacity = capacity; this.tokens = [];
    this.embedding = tensors["embedding.embedding"].values;
    this.layers = Array.from({ length: model.num_layers }, (_, layer) => ({
      attentionNorm: norm(name => stacked(`attention_norm.norm.${name}`, layer).values),
      mlpNorm: norm(name => stacked(`mlp_norm.norm.${name}`, layer).values),
      ...Object.fromEntries(["query", "key", "value", "out"].map(name => [name, dense(`attention.${name}`, layer)])),
      inner: dense("mlp.inner", layer), outer: dense("mlp.outer", layer), table: stacked("encoding.cope.table", layer).values,
      q: rows(this.width), k: rows(this.width), v: rows(this.width),
    }));
    this.norm = norm(name => tensors[`norm.norm.${name}`].values);
    this.out = { inputs: this.width, outputs: model.vocab_size, bias: null,
      weight: model.tie_embeddings ? this.embedding.map(value => value / Math.sqrt(this.width))
        : transposed(tensors["out.kernel"].values, this.width, model.vocab_size) };
    this.x = rows(this.width); this.normed = rows(this.width); this.added = rows(this.width);
    this.hidden = rows(this.layers[0].inner.outputs); this.scores = new Float64Array(capacity);
  }

  // Reads tokens. Only those from the first that differs from the last call are computed.
  read(tokens) {
    if (tokens.length > this.capacity) throw new Error(`at most ${this.capacity} tokens, got ${tokens.length}`);
    let from = 0;
    while (from < tokens.length && tokens[from] === this.tokens[from]) from++;
    const to = tokens.length, { width, x, normed, added, hidden } = this;
    this.tokens = [...tokens];
    for (let i = from; i < to; i++) x.set(this.embedding.subarray(tokens[i] * width, (tokens[i] + 1) * width), i * width);
    this.layers.forEach((layer, index) => {
      this.#normalise(x, layer.attentionNorm, normed, from, to);
      linear(normed, layer.query, layer.q, from, to);
      linear(normed, layer.key, layer.k, from, to);
      linear(normed, layer.value, layer.v, from, to);
      for (let i = from; i < to; i++) for (let h = 0; h < this.heads; h++) this.#mix(layer, index, h, i);
      linear(normed, layer.out, added, from, to);
      this.#add(added, from, to);
      this.#normalise(x, layer.mlpNorm, normed, from, to);
      linear(normed, layer.inner, hidden, from, to);
      for (let i = from * layer.inner.outputs; i < to * layer.inner.outputs; i++) hidden[i] = gelu(hidden[i]);
      linear(hidden, layer.outer, added, from, to);
      this.#add(added, from, to);
    });
    return this;
  }

  // The logits of the token after token `query`.
  logits(query) {
    const y = new Float32Array(this.out.outputs), normed = new Float32Array(this.width);
    this.#normalise(this.x.subarray(query * this.width), this.norm, normed, 0, 1);
    linear(normed, this.out, y, 0, 1);
    return y;
  }

  // What a query sees of each key up to itself: {gates, positions, attention}.
  maps(layer, head, query) {
    const { q, k, table } = this.layers[layer], K = this.width / this.heads, last = table.length / K - 1, at = head * K;
    const gates = new Float64Array(query + 1), positions = new Float64Array(query + 1), attention = new Float64Array(query + 1);
    const dot = (keys, start) => { let sum = 0; for (let i = 0; i < K; i++) sum += q[query * this.width + at + i] * keys[start + i]; return sum; };
    const added = []; // q·e[n], for the positions that occur
    let position = 0, most = -Infinity, total = 0;
    for (let j = query; j >= 0; j--) {
      const logit = dot(k, j * this.width + at) / Math.sqrt(K);
      gates[j] = 1 / (1 + Math.exp(-logit));
      positions[j] = position = Math.min(position + gates[j], last);
      const low = Math.floor(position), high = Math.ceil(position), share = position - low;
      added[low] ??= dot(table, low * K);
      added[high] ??= dot(table, high * K);
      attention[j] = logit + (1 - share) * added[low] + share * added[high];
      most = Math.max(most, attention[j]);
    }
    for (let j = 0; j <= query; j++) total += attention[j] = Math.exp(attention[j] - most);
    for (let j = 0; j <= query; j++) attention[j] /= total;
    return { gates, positions, attention };
  }

  // Head h of token i: Σ_j a_ij v_j, into `normed`, whose row the products with q, k and v no longer need.
  #mix(layer, index, h, i) {
    const { attention } = this.maps(index, h, i), K = this.width / this.heads, { v } = layer, sums = new Float64Array(K);
    for (let j = 0; j <= i; j++) for (let c = 0; c < K; c++) sums[c] += attention[j] * v[j * this.width + h * K + c];
    this.normed.set(sums, i * this.width + h * K);
  }

  #normalise(x, { scale, bias }, y, from, to) {
    for (let i = from; i < to; i++) {
      const begin = i * this.width;
      let mean = 0, square = 0;
      for (let c = 0; c < this.width; c++) mean += x[begin + c] / this.width;
      for (let c = 0; c < this.width; c++) square += (x[begin + c] - mean) ** 2 / this.width;
      const factor = 1 / Math.sqrt(square + this.epsilon);
      for (let c = 0; c < this.width; c++) y[begin + c] = (x[begin + c] - mean) * factor * scale[c] + bias[c];
    }
  }

  #add(added, from, to) {
    for (let i = from * this.width; i < to * this.width; i++) this.x[i] += added[i];
  }
}
