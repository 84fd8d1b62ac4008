// The forward pass of a decoder with CoPE, in plain JavaScript: `cope_jax.models.decoder` with
// pre-norm LayerNorm, the tanh form of GELU and biases. It computes in float64, which
// plain JavaScript does fastest.

// The tensors of a safetensors file, by name: {values, shape}.
export function readTensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true)), begin = 8 + size;
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  delete header.__metadata__;
  return Object.fromEntries(Object.entries(header).map(([name, { shape, data_offsets: [from, to] }]) =>
    [name, { shape, values: Float64Array.from(new Float32Array(buffer.slice(begin + from, begin + to))) }]));
}

function transposed(matrix, rows, columns) {
  const result = new Float64Array(matrix.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) result[j * rows + i] = matrix[i * columns + j];
  return result;
}

// Row r of y, from row `from` up to `to`, is W x_r + b. W is [outputs, inputs]. Four rows and two outputs at a
// time, so that a number that is read is used more than once; then the last rows.
function linear(x, { weight, bias, inputs, outputs }, y, from, to) {
  let r = from;
  for (; r + 4 <= to; r += 4) {
    const x0 = r * inputs, x1 = x0 + inputs, x2 = x1 + inputs, x3 = x2 + inputs;
    for (let o = 0; o < outputs; o += 2) {
      const p = Math.min(o + 1, outputs - 1), w0 = o * inputs, w1 = p * inputs, b0 = bias?.[o] ?? 0, b1 = bias?.[p] ?? 0;
      let a0 = b0, a1 = b0, a2 = b0, a3 = b0, c0 = b1, c1 = b1, c2 = b1, c3 = b1;
      for (let i = 0; i < inputs; i++) {
        const u = weight[w0 + i], v = weight[w1 + i], s0 = x[x0 + i], s1 = x[x1 + i], s2 = x[x2 + i], s3 = x[x3 + i];
        a0 += u * s0; a1 += u * s1; a2 += u * s2; a3 += u * s3;
        c0 += v * s0; c1 += v * s1; c2 += v * s2; c3 += v * s3;
      }
      const y0 = r * outputs, y1 = y0 + outputs, y2 = y1 + outputs, y3 = y2 + outputs;
      y[y0 + o] = a0; y[y1 + o] = a1; y[y2 + o] = a2; y[y3 + o] = a3;
      y[y0 + p] = c0; y[y1 + p] = c1; y[y2 + p] = c2; y[y3 + p] = c3;
    }
  }
  for (; r < to; r++) for (let o = 0; o < outputs; o++) y[r * outputs + o] = (bias?.[o] ?? 0) + dot(x, r * inputs, weight, o * inputs, inputs);
}

const SCALE = Math.sqrt(2 / Math.PI);
const gelu = x => x / (1 + Math.exp(-2 * SCALE * (x + 0.044715 * x * x * x))); // x/2 (1 + tanh u) = x σ(2u)

// Σ_i a[at + i] b[from + i] of `count` numbers, a multiple of 4, in four sums that do not wait for each other.
function dot(a, at, b, from, count) {
  let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  for (let i = 0; i < count; i += 4) {
    s0 += a[at + i] * b[from + i]; s1 += a[at + i + 1] * b[from + i + 1];
    s2 += a[at + i + 2] * b[from + i + 2]; s3 += a[at + i + 3] * b[from + i + 3];
  }
  return s0 + s1 + s2 + s3;
}

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
    const rows = width => new Float64Array(capacity * width);
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
    this.added = new Float64Array(this.layers[0].table.length);
    this.norm = norm(name => tensors[`norm.norm.${name}`].values);
    this.out = { inputs: this.width, outputs: model.vocab_size, bias: null,
      weight: model.tie_embeddings ? this.embedding.map(value => value / Math.sqrt(this.width))
        : transposed(tensors["out.kernel"].values, this.width, model.vocab_size) };
    this.x = rows(this.width); this.normed = rows(this.width); this.stream = rows(this.width);
    this.hidden = rows(this.layers[0].inner.outputs); this.scratch = [rows(1), rows(1), rows(1)];
  }

  // Reads tokens. Only those from the first that differs from the last call are computed.
  read(tokens) {
    if (tokens.length > this.capacity) throw new Error(`at most ${this.capacity} tokens, got ${tokens.length}`);
    let from = 0;
    while (from < tokens.length && tokens[from] === this.tokens[from]) from++;
    const to = tokens.length, { width, x, normed, stream, hidden } = this;
    this.tokens = [...tokens];
    for (let i = from; i < to; i++) x.set(this.embedding.subarray(tokens[i] * width, (tokens[i] + 1) * width), i * width);
    for (const layer of this.layers) {
      this.#normalise(x, layer.attentionNorm, normed, from, to);
      linear(normed, layer.query, layer.q, from, to);
      linear(normed, layer.key, layer.k, from, to);
      linear(normed, layer.value, layer.v, from, to);
      for (let i = from; i < to; i++) for (let h = 0; h < this.heads; h++) this.#mix(layer, h, i);
      linear(normed, layer.out, stream, from, to);
      this.#add(stream, from, to);
      this.#normalise(x, layer.mlpNorm, normed, from, to);
      linear(normed, layer.inner, hidden, from, to);
      for (let i = from * layer.inner.outputs; i < to * layer.inner.outputs; i++) hidden[i] = gelu(hidden[i]);
      linear(hidden, layer.outer, stream, from, to);
      this.#add(stream, from, to);
    }
    return this;
  }

  // The logits of the token after token `query`.
  logits(query) {
    const y = new Float64Array(this.out.outputs), normed = new Float64Array(this.width);
    this.#normalise(this.x.subarray(query * this.width), this.norm, normed, 0, 1);
    linear(normed, this.out, y, 0, 1);
    return y;
  }

  // What a query sees of each key up to itself: {gates, positions, attention}.
  maps(layer, head, query) {
    const [gates, positions, attention] = [0, 1, 2].map(() => new Float64Array(query + 1));
    this.#attend(this.layers[layer], head, query, gates, positions, attention);
    return { gates, positions, attention };
  }

  #attend({ q, k, table }, head, query, gates, positions, attention) {
    const { width, added } = this, K = width / this.heads, last = table.length / K - 1, begin = query * width + head * K, scale = 1 / Math.sqrt(K);
    let position = 0, most = -Infinity, total = 0, known = -1; // added[n] is q·e[n], up to n = known
    for (let j = query; j >= 0; j--) {
      const logit = dot(q, begin, k, j * width + head * K, K) * scale;
      gates[j] = 1 / (1 + Math.exp(-logit));
      positions[j] = position = Math.min(position + gates[j], last);
      const low = Math.floor(position), high = Math.ceil(position), share = position - low;
      while (known < high) added[++known] = dot(q, begin, table, known * K, K);
      attention[j] = logit + (1 - share) * added[low] + share * added[high];
      if (attention[j] > most) most = attention[j];
    }
    for (let j = 0; j <= query; j++) total += attention[j] = Math.exp(attention[j] - most);
    for (let j = 0; j <= query; j++) attention[j] /= total;
  }

  // Head h of token i: Σ_j a_ij v_j, into `normed`, whose row the products with q, k and v no longer need.
  #mix(layer, h, i) {
    const { width, normed, scratch: [gates, positions, attention] } = this, K = width / this.heads, { v } = layer;
    this.#attend(layer, h, i, gates, positions, attention);
    normed.fill(0, i * width + h * K, i * width + (h + 1) * K);
    for (let j = 0; j <= i; j++) {
      const weight = attention[j], from = j * width + h * K, to = i * width + h * K;
      for (let c = 0; c < K; c++) normed[to + c] += weight * v[from + c];
    }
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

  #add(stream, from, to) {
    for (let i = from * this.width; i < to * this.width; i++) this.x[i] += stream[i];
  }
}
