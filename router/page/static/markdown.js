// Shows Markdown: the subset that models write, as elements made one by one. HTML in the text is shown as the text that it
// is, images are shown as links, and only http, https and mailto links can be followed. So nothing that a model writes
// runs, or loads anything.
//
// A text is cut into top-level blocks. Only its last one may still change while the text grows, so what was shown before
// is left alone, however long the text is.

import { copyButton, h } from "./dom.js";

const LONGEST_BLOCK = 16_000; // characters; a longer one is cut, so that showing it again stays cheap
const LONGEST_INLINE = 20_000; // characters; a longer text is shown without emphasis and links
const DEEPEST = 8; // levels of lists, quotes and emphasis

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\n`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?![^ \t\r\n])/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TABLE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

// ---- blocks ----

/**
 * Finds the next top-level block of a text.
 * @returns {{kind: string, start: number, end: number, closed: boolean}|null} `closed`: it will not change when the text
 *     grows. Null if only white space is left.
 */
function nextBlock(text, from) {
  const lines = lineReader(text, from);
  let line = lines.next();
  while (line && !line.text.trim()) line = lines.next();
  if (!line) return null;
  const start = line.start;
  const block = (kind, end, closed) => ({ kind, start, end, closed });
  const fence = FENCE.exec(line.text);
  if (fence) {
    const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
    while ((line = lines.next())) if (closing.test(line.text)) return block("code", line.end, line.complete);
    return block("code", text.length, false);
  }
  if (HEADING.test(line.text)) return block("heading", line.end, line.complete);
  if (RULE.test(line.text)) return block("rule", line.end, line.complete);
  if (QUOTE.test(line.text))
    return untilLine(lines, line, "quote", start, (one) => one.text.trim() && QUOTE.test(one.text));
  if (ITEM.test(line.text)) return listBlock(lines, line, start);
  return paragraphBlock(lines, line, start);
}

function untilLine(lines, line, kind, start, goesOn) {
  let end = line.end;
  if (line.cut) return { kind, start, end, closed: true };
  while ((line = lines.next())) {
    if (!goesOn(line)) return { kind, start, end, closed: true };
    end = line.end;
    if (line.cut || (line.complete && end - start > LONGEST_BLOCK)) return { kind, start, end, closed: true };
  }
  return { kind, start, end, closed: false };
}

function listBlock(lines, line, start) {
  const ordered = /\d/.test(ITEM.exec(line.text)[2]);
  let blank = false;
  return untilLine(lines, line, "list", start, (one) => {
    const item = ITEM.exec(one.text);
    if (!one.text.trim()) {
      blank = true;
      return true;
    }
    const indented = /^(?: {2,}|\t)/.test(one.text);
    const same = item && !RULE.test(one.text) && /\d/.test(item[2]) === ordered;
    const goesOn = indented || same || (!blank && !startsBlock(one.text));
    blank = false;
    return goesOn;
  });
}

function paragraphBlock(lines, line, start) {
  let kind = "paragraph";
  let first = true;
  const header = line.text;
  const block = untilLine(lines, line, kind, start, (one) => {
    if (first && header.includes("|") && TABLE.test(one.text) && one.text.includes("-")) kind = "table";
    first = false;
    return (
      one.text.trim() && (kind === "table" ? one.text.includes("|") || TABLE.test(one.text) : !startsBlock(one.text))
    );
  });
  return { ...block, kind };
}

function startsBlock(text) {
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text);
}

// Reads lines from a place in a text. A line without its "\n" is not `complete`. A very long line is `cut` into several.
function lineReader(text, from) {
  let at = from;
  return {
    next() {
      if (at >= text.length) return null;
      const start = at;
      const newline = text.indexOf("\n", at);
      let end = newline === -1 ? text.length : newline;
      let complete = newline !== -1;
      let cut = false;
      at = complete ? end + 1 : end;
      if (end - start > LONGEST_BLOCK) {
        const space = text.lastIndexOf(" ", start + LONGEST_BLOCK);
        end = at = space > start ? space + 1 : start + LONGEST_BLOCK;
        complete = cut = true;
      }
      return { text: text.slice(start, end), start, end: at, complete, cut };
    },
  };
}

function blocksOf(text) {
  const blocks = [];
  for (let block = nextBlock(text, 0); block; block = nextBlock(text, block.end))
    blocks.push([block.kind, text.slice(block.start, block.end)]);
  return blocks;
}

// ---- elements ----

function element(kind, source, depth) {
  switch (kind) {
    case "code":
      return code(source).element;
    case "heading": {
      const [start, { length: level }] = HEADING.exec(source);
      // below the headings of the page itself
      return h(`h${Math.min(6, level + 2)}`, {}, inline(withoutClosingMarks(source.slice(start.length).trim())));
    }
    case "rule":
      return h("hr");
    case "quote": {
      const text = source.replace(/^ {0,3}> ?/gm, "");
      return h("blockquote", {}, depth < DEEPEST ? elements(text, depth + 1) : text);
    }
    case "list":
      return list(source, depth);
    case "table":
      return table(source);
    default:
      return h("p", {}, inline(source.trim()));
  }
}

// "Title ##" → "Title", but "C#" stays. The search runs from the end, since a pattern would try each run of marks again.
function withoutClosingMarks(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || /[ \t]/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

function elements(text, depth) {
  return blocksOf(text).map(([kind, source]) => element(kind, source, depth));
}

function code(source) {
  const [first, ...rest] = source.split("\n");
  const [, marks, info] = FENCE.exec(first);
  const language = info.trim().split(/\s/, 1)[0];
  const closed =
    rest.length && new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`).test(rest.at(-1) || rest.at(-2) || "");
  if (rest.at(-1) === "") rest.pop();
  if (closed) rest.pop();
  const pre = h("pre", { tabindex: "0", role: "group", "aria-label": language ? `${language} code` : "Code" });
  addCode(pre, rest.join("\n"));
  const copy = copyButton("Copy code", () => pre.textContent);
  return {
    element: h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", { text: language }), copy), pre),
    pre,
  };
}

// Adds text to a code block, in pieces: browsers then lay out only those that are in sight.
function addCode(pre, text) {
  let at = 0;
  do {
    let piece = pre.lastElementChild;
    if (!piece || (piece.textContent.length >= LONGEST_BLOCK && piece.textContent.endsWith("\n"))) {
      piece = h("code", {}, document.createTextNode(""));
      pre.append(piece);
    }
    const newline = text.indexOf("\n", at + Math.max(0, LONGEST_BLOCK - piece.textContent.length));
    const end = newline === -1 ? text.length : newline + 1;
    piece.firstChild.appendData(text.slice(at, end));
    at = end;
  } while (at < text.length);
}

function list(source, depth) {
  const items = [];
  let ordered = null; // the first item's mark
  let base = 0; // its indentation
  for (const line of source.split("\n")) {
    const item = ITEM.exec(line);
    const nested = item && ordered !== null && item[1].length >= base + 2;
    if (item && !nested && (ordered === null || /\d/.test(item[2]) === /\d/.test(ordered))) {
      if (ordered === null) [, { length: base }, ordered] = item;
      items.push({ indent: item[0].length, lines: [line.slice(item[0].length)] });
    } else if (items.length) {
      const { indent, lines } = items.at(-1);
      const spaces = /^[ \t]*/.exec(line)[0].length;
      lines.push(line.slice(Math.min(indent, spaces)));
    }
  }
  const number = /\d+/.exec(ordered);
  const loose = /\n[ \t]*\n[ \t]*\S/.test(source);
  const made = items.map(({ lines }) => h("li", {}, itemContent(lines.join("\n").trim(), depth, loose)));
  return number ? h("ol", { start: number[0] === "1" ? null : number[0] }, made) : h("ul", {}, made);
}

function itemContent(text, depth, loose) {
  if (depth >= DEEPEST) return text;
  const [task, mark] = /^\[([ xX])\][ \t]+/.exec(text) ?? [""];
  const blocks = blocksOf(text.slice(task.length)).flatMap(([kind, source]) =>
    // a list without empty lines has text, not paragraphs
    kind === "paragraph" && !loose ? inline(source.trim()) : [element(kind, source, depth + 1)],
  );
  return task ? [mark === " " ? "☐ " : "☑ ", ...blocks] : blocks;
}

function table(source) {
  const [head, rule, ...body] = source.trim().split("\n");
  const sides = cells(rule).map((cell) => (/:$/.test(cell) ? (/^:/.test(cell) ? "center" : "right") : "left"));
  const row = (line, tag) =>
    h(
      "tr",
      {},
      cells(line)
        .slice(0, sides.length)
        .map((cell, at) => h(tag, { class: `to-${sides[at]}`, scope: tag === "th" ? "col" : null }, inline(cell))),
    );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, row(head, "th")),
      h(
        "tbody",
        {},
        body.map((line) => row(line, "td")),
      ),
    ),
  );
}

function cells(line) {
  const inner = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// ---- text within a block ----

const SPECIAL = /[\\*_~[!<\n]|`+|https?:\/\//g;
const CODE = /(`+)(?!`)([^]{0,4000}?[^`])\1(?!`)/y;
const STRONG = /\*\*(?=\S)([^]{0,2000}?[^\s\\])\*\*|__(?=\S)([^]{0,2000}?[^\s\\])__(?![\p{L}\p{N}])/uy;
const BOTH = /\*\*\*(?=\S)([^]{0,2000}?[^\s\\])\*\*\*/y;
const EMPHASIS = /\*(?=[^\s*])([^]{0,2000}?[^\s\\*])\*(?!\*)|_(?=[^\s_])([^]{0,2000}?[^\s\\_])_(?![\p{L}\p{N}_])/uy;
const STRUCK = /~~(?=\S)([^]{0,2000}?\S)~~/y;
const LINK =
  /!?\[((?:[^[\]\\]|\\.|\[[^[\]]{0,200}\]){0,500})\]\([ \t]*<?([^\s<>()]{0,2000}(?:\([^\s()]{0,200}\)[^\s()<>]{0,500}){0,4})>?(?:[ \t]+"[^"\n]{0,500}")?[ \t]*\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>"'`]{1,2000}?)(?:>|(?=[.,;:!?)\]]*(?:[\s<>"'`]|$)))/y;

/** The nodes that show a text with emphasis, code and links. */
export function inline(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST_INLINE) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  const add = (node, length) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    at += length;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    if (!special) break;
    plain += text.slice(at, special.index);
    at = special.index;
    const found = spanAt(text, at, depth);
    if (found) add(...found);
    else if (special[0] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += special[0];
      at += special[0].length;
    }
  }
  plain += text.slice(at);
  return plain ? [...nodes, plain] : nodes;
}

function spanAt(text, at, depth) {
  const match = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };
  let found;
  switch (text[at]) {
    case "\n":
      return [h("br"), 1];
    case "`":
      found = match(CODE);
      return (
        found && [h("code", { text: found[2].replace(/^ (.*\S.*) $/s, "$1").replaceAll("\n", " ") }), found[0].length]
      );
    case "*":
    case "_":
      if (text[at] === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) return null; // snake_case
      if ((found = match(BOTH))) return [h("strong", {}, h("em", {}, inline(found[1], depth + 1))), found[0].length];
      if ((found = match(STRONG))) return [h("strong", {}, inline(found[1] ?? found[2], depth + 1)), found[0].length];
      found = match(EMPHASIS);
      return found && [h("em", {}, inline(found[1] ?? found[2], depth + 1)), found[0].length];
    case "~":
      found = match(STRUCK);
      return found && [h("s", {}, inline(found[1], depth + 1)), found[0].length];
    case "[":
    case "!":
      found = match(LINK);
      return found && [link(found[2], found[1] ? inline(found[1], depth + 1) : [found[2]]), found[0].length];
    default:
      found = match(ADDRESS);
      return found && [link(found[1], [found[1]]), found[0].length];
  }
}

function link(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return h("span", {}, children);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return h("span", {}, children);
  return h("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

// ---- a text that grows ----

const SLICE_MS = 8; // time for which `update` works before others come to their turn

/** Shows a text that grows. */
export class Markdown {
  /** @param {Element} container Gets the elements. */
  constructor(container) {
    this.container = container;
    this.done = 0; // characters of closed blocks
    this.tail = null; // what shows the open block
    this.tailText = "";
    this.openCode = null;
  }

  /**
   * Shows the text so far.
   * @param {string} text The whole text; it begins with the last one.
   * @returns {boolean} True if some of it is left for the next call, since it would take too long now.
   */
  update(text) {
    const until = performance.now() + SLICE_MS;
    for (let block = nextBlock(text, this.done); block; block = nextBlock(text, this.done)) {
      if (!block.closed) {
        this.#showOpen(block, text.slice(block.start, block.end));
        return false;
      }
      this.#replaceTail(element(block.kind, text.slice(block.start, block.end), 0));
      this.tail = null;
      this.done = block.end;
      if (performance.now() > until) return true;
    }
    return false;
  }

  #showOpen(block, source) {
    if (source === this.tailText && this.tail) return;
    const grows = this.openCode && this.tail && source.startsWith(this.tailText) && this.tailText.includes("\n");
    if (block.kind === "code" && grows) {
      addCode(this.openCode, source.slice(this.tailText.length));
    } else if (block.kind === "code") {
      const made = code(source);
      this.#replaceTail(made.element);
      this.openCode = made.pre;
      if (source.endsWith("\n") && source.indexOf("\n") < source.length - 1) addCode(made.pre, "\n");
    } else {
      this.#replaceTail(element(block.kind, source, 0));
    }
    this.tailText = source;
  }

  #replaceTail(element) {
    if (this.tail) this.tail.replaceWith(element);
    else this.container.append(element);
    this.tail = element;
    this.tailText = "";
    this.openCode = null;
  }
}
