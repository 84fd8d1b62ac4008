// The page of docs/gates/: reads the text at each key, and shows what the model sees.
import { Decoder } from "./forward.js";
import { append, encode, removeLast, textOf } from "./text.js";
import { make, view, visible } from "./viewer.js";

const CAPACITY = 256;
const byId = name => document.getElementById(name);
const get = async name => {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name}: ${response.status}`);
  return response;
};
const models = await (await get("models.json")).json();
const state = { name: null, model: null, draw: null };
const say = text => { byId("gates-status").textContent = text; };

function update() {
  const { model } = state, { tokens, labels, rest } = encode(model, byId("gates-text").value);
  const count = Math.min(tokens.length, CAPACITY);
  byId("gates-view").hidden = byId("gates-next").hidden = !count;
  const problem = rest ? `Not a token yet: ${rest.slice(0, 20)}. The tokens are ${model.vocabulary.filter(word => word !== "<pad>").join(" ")}`
    : count < tokens.length ? `Of ${tokens.length} tokens, the page reads the first ${CAPACITY}.` : "";
  if (!count) { say(problem || "Type, or choose an example."); return; }
  model.decoder.read(tokens.slice(0, count));
  const best = query => {
    const logits = model.decoder.logits(query), most = Math.max(...logits), shares = Array.from(logits, value => Math.exp(value - most));
    const total = shares.reduce((a, b) => a + b);
    return shares.map((share, token) => [share / total, token]).sort((a, b) => b[0] - a[0]);
  };
  const label = token => { const text = textOf(model, token); return text === null ? (model.vocabulary?.[token] ?? (token < 256 ? `byte ${token}` : "end")) : visible(text); };
  best(count - 1).slice(0, 6).forEach(([share, token], place) => {
    const node = byId("gates-next").children[place], text = textOf(model, token);
    node.textContent = `${label(token)} ${(100 * share).toFixed(share < .1 ? 1 : 0)} %`;
    node.disabled = text === null || count === CAPACITY;
    node.onclick = () => write(append(model, byId("gates-text").value, text));
  });
  const { config: { model: { num_layers, block: { num_heads } } } } = model, numbers = count => [...Array(count).keys()];
  const data = {
    tokens: labels.slice(0, count), query: count - 1, layers: numbers(num_layers), heads: numbers(num_heads), best: model.best,
    maps: ["gates", "positions", "attention"], shading: "gates", mark: query => query === count - 1 ? model.mark : "",
    rows: (...where) => Object.fromEntries(Object.entries(model.decoder.maps(...where)).map(([name, row]) => [name, [...row]])),
    predicts: query => { const [[share, token]] = best(query); return ` predicts ${label(token)} with probability ${share.toFixed(2)}`; },
  };
  if (state.draw) state.draw(data); else state.draw = view(byId("gates-view"), data);
  say(problem || `${count} tokens. ${model.note}`);
}

function write(text) { byId("gates-text").value = text; state.model.text = text; update(); }

async function choose(name) {
  const model = models[name];
  state.name = name;
  for (const node of byId("gates-models").children) node.setAttribute("aria-pressed", node.value === name);
  if (!model.decoder) {
    say(`Loading ${(model.bytes / 1e6).toFixed(1)} MB …`);
    model.decoder ??= new Decoder(await (await get(`${name}.safetensors`)).arrayBuffer(), model.config, CAPACITY);
    if (state.name !== name) return; // another was chosen meanwhile
  }
  state.model = model; byId("gates-text").disabled = false;
  byId("gates-examples").replaceChildren(...Object.entries(model.examples).map(([title, text]) => button(title, () => write(text))));
  byId("gates-keys").replaceChildren(...model.keys.map(word => button(word, () => write(append(model, byId("gates-text").value, word)))),
    button("⌫", () => write(removeLast(model, byId("gates-text").value)), "remove the last token"), button("clear", () => write("")));
  write(model.text ?? Object.values(model.examples)[0]);
}

function button(text, onclick, label) {
  const node = make("button", text);
  node.type = "button"; node.onclick = onclick;
  if (label) node.setAttribute("aria-label", label);
  return node;
}

for (const [name, { title }] of Object.entries(models)) byId("gates-models").append(Object.assign(button(title, () => open(name)), { value: name }));
for (let place = 0; place < 6; place++) byId("gates-next").append(button(""));
byId("gates-text").oninput = () => { state.model.text = byId("gates-text").value; update(); };
const open = name => choose(name).catch(error => say(`The model could not be loaded: ${error.message}`));
await open("counting");
