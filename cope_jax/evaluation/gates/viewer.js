// Draws what a query of a model counts and attends to, for reports and for a page of the documentation.
export const make = (name, text, parent) => { const node = document.createElement(name); node.textContent = text ?? ""; parent?.append(node); return node; };
export const visible = text => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
// Negative gates are orange.
const colour = share => [...(share < 0 ? [230, 120, 30] : [47, 111, 222]), .8 * Math.min(1, Math.abs(share))];
const change = (node, name, value) => { if (node[name] !== value) node[name] = value; }; // a browser draws again what is set
const largest = (map, values) => map === "positions" ? Math.max(1, ...values) : map === "attention" ? Math.max(.01, ...values) : 1;

/* Fills the element `root`, and returns a function that shows other data. The data has
 *   tokens, layers, heads: what to write for each; query: index of the first query to show;
 *   maps: names of maps; shading: the first map to show; best: [layer, head], the first to show;
 *   rows(layer, head, query): for each map, its numbers for the keys up to the query;
 *   predicts(query): what to say of the next token; mark(query): what to say of the best head. */
export function view(root, data) {
  root.innerHTML = `<div class="controls"><label>Layer <select id="layer"></select></label>
    <label>Head <select id="head"></select></label><label>Colour <select id="map"></select></label></div>
    <p class="says" id="says" aria-live="polite"></p><div class="tokens"></div>
    <p class="soft"></p><div class="heads"></div>`;
  const [says, row, how, grid] = root.querySelectorAll(":scope > :not(.controls)");
  const [layers, heads, maps] = root.querySelectorAll("select");
  let chosen, tokens = [], cards = [];
  row.onmouseleave = () => show(chosen);
  for (const select of [layers, heads, maps]) select.onchange = () => show(chosen);

  const choose = place => show(chosen = place);
  function token(place) {
    const node = make("button", "", row); node.type = "button"; node.className = "token"; node.append("", make("small")); node.lastChild.append("");
    node.onmouseenter = () => show(place);
    node.onclick = node.onfocus = () => choose(place);
    node.onkeydown = event => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (step) { tokens[Math.min(tokens.length - 1, Math.max(0, place + step))].focus(); event.preventDefault(); }
    };
    return node;
  }
  function card(l, h) {
    const node = make("button", "", grid); node.type = "button"; node.className = "head"; node.append("", make("canvas"));
    node.lastChild.className = "strip"; node.layer = l; node.head = h;
    node.onclick = () => { layers.value = l; heads.value = h; show(chosen); };
    return node;
  }
  function show(query) {
    if (!tokens[query]) return;
    const layer = +layers.value, head = +heads.value, map = maps.value;
    const rows = data.rows(layer, head, query), values = rows[map], top = largest(map, values);
    tokens.forEach((node, key) => {
      node.classList.toggle("query", key === query); node.classList.toggle("later", key > query);
      node.tabIndex = key === chosen ? 0 : -1;
      const [r, g, b, share] = colour(values[key] / top);
      node.style.background = key <= query ? `rgb(${r} ${g} ${b} / ${share.toFixed(3)})` : "";
      change(node.lastChild.firstChild, "data", key <= query && rows.positions ? rows.positions[key].toFixed(1) : "");
    });
    const counted = values.map((value, key) => [value, key]).sort((a, b) => b[0] - a[0]).slice(0, 5);
    says.textContent = `query ${query} (${visible(data.tokens[query])})${data.predicts(query)}; layer ${data.layers[layer]}, head ${data.heads[head]}: highest ${map}: `
      + counted.map(([value, key]) => `${visible(data.tokens[key])} (${key}) ${value.toFixed(2)}`).join(", ");
    for (const node of cards) {
      const own = data.rows(node.layer, node.head, query)[map], most = largest(map, own);
      const mark = node.layer === data.best[0] && node.head === data.best[1] ? data.mark(query) : "";
      node.firstChild.data = `layer ${data.layers[node.layer]}, head ${data.heads[node.head]}${mark}`;
      node.setAttribute("aria-pressed", node.layer === layer && node.head === head);
      const strip = node.lastChild;
      strip.width = tokens.length; strip.height = 1;
      const pixels = own.flatMap(value => colour(value / most).map((part, channel) => channel < 3 ? part : 255 * part));
      strip.getContext("2d").putImageData(new ImageData(Uint8ClampedArray.from(pixels), own.length), 0, 0);
    }
  }
  function draw(next) {
    const fresh = data.best !== next.best || !cards.length;
    data = next;
    if (fresh) {
      how.textContent = "Point at a token, touch it, or reach it with the Tab and arrow keys: it becomes the query. The colours above are "
        + (data.maps.includes("gates") ? "the gates of the tokens before it, which decide what the head counts, or its attention; the numbers are the positions. " : "its attention. ")
        + "Below are all heads, for the same query: choose one to see it above.";
      [layers, heads, maps, grid].forEach(node => node.replaceChildren());
      data.layers.forEach((number, place) => { make("option", number, layers).value = place; });
      data.heads.forEach((number, place) => { make("option", number, heads).value = place; });
      data.maps.forEach(name => make("option", name, maps));
      maps.value = data.shading; [layers.value, heads.value] = data.best;
      cards = data.layers.flatMap((_, l) => data.heads.map((_, h) => card(l, h)));
    }
    tokens.splice(data.tokens.length).forEach(node => node.remove());
    data.tokens.forEach((text, place) => { change((tokens[place] ??= token(place)).firstChild, "data", visible(text)); });
    choose(data.query);
  }
  draw(data);
  return draw;
}
