// Text to tokens and back, for the page of docs/gates/.

// Returns {tokens, labels, rest}: numbers, what to write for each, and the end of the text that is no token.
export function encode({ vocabulary, begin }, text) {
  if (!vocabulary) {
    const tokens = [...begin], labels = begin.map(() => "start");
    for (const character of text) {
      const bytes = new TextEncoder().encode(character);
      tokens.push(...bytes);
      labels.push(character, ...Array(bytes.length - 1).fill("·")); // a character may have several bytes
    }
    return { tokens, labels, rest: "" };
  }
  // The longest token first; spaces between tokens may be left out.
  const words = vocabulary.filter(word => word !== "<pad>").sort((a, b) => b.length - a.length);
  const labels = [];
  let rest = text.trimStart();
  for (let word; rest && (word = words.find(word => rest.startsWith(word)));) {
    labels.push(word);
    rest = rest.slice(word.length).trimStart();
  }
  return { tokens: [...begin, ...labels.map(word => vocabulary.indexOf(word))], labels, rest };
}

// The text of one predicted token, or null if it cannot be added to a text.
export function textOf({ vocabulary }, token) {
  if (vocabulary) return vocabulary[token] === "<pad>" ? null : vocabulary[token];
  return token < 128 ? String.fromCharCode(token) : null;
}

// The text with one more token, or with the last token removed.
export const append = ({ vocabulary }, text, word) => vocabulary && text.trim() ? `${text.trimEnd()} ${word}` : text + word;
export function removeLast(model, text) {
  if (!model.vocabulary) return [...text].slice(0, -1).join("");
  const { labels, rest } = encode(model, text);
  return (rest ? labels : labels.slice(0, -1)).join(" ");
}
