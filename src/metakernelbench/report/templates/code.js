// Python in colours, and what changed between two kernels. Colours are made here: in the file they would triple it.

const TOKEN = new RegExp([
  /(?<c>#[^\n]*)/,
  /(?<s>\b[rbfu]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?)|(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?))/,
  /(?<f>(?<=\b(?:def|class) )\w+|(?<=^|\n)[ \t]*@[\w.]+)/,
  /(?<m>(?<![\w.])\d[\w.]*)/,
  /(?<k>\b(?:False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield)\b)/,
].map((part) => part.source).join("|"), "gi");

// Lines of a text, each a list of [kind, text].
function colouredLines(text) {
  const lines = [[]];
  const add = (kind, piece) => piece.split("\n").forEach((part, index) => {
    if (index) lines.push([]);
    if (part) lines.at(-1).push([kind, part]);
  });
  let end = 0;
  for (const match of text.matchAll(TOKEN)) {
    add("", text.slice(end, match.index));
    add(Object.entries(match.groups).find(([, found]) => found !== undefined)[0], match[0]);
    end = match.index + match[0].length;
  }
  add("", text.slice(end));
  return lines;
}

function nodesOf(line) {
  return line.map(([kind, text]) => {
    if (!kind) return document.createTextNode(text);
    const token = document.createElement("i");
    token.className = kind;
    token.textContent = text;
    return token;
  });
}

function colour(code) {
  code.classList.add("coloured");
  const lines = colouredLines(code.textContent);
  code.replaceChildren(...lines.flatMap((line, index) => index ? [document.createTextNode("\n"), ...nodesOf(line)] : nodesOf(line)));
}

// The shortest edit from one list to another, after E. W. Myers (1986): [[sign, index in a, index in b], …] with
// sign " ", "-" or "+". Undefined where more than `most` lines differ.
function edits(a, b, most = 3000) {
  let start = 0, endA = a.length, endB = b.length;
  while (start < endA && start < endB && a[start] === b[start]) start++;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) { endA--; endB--; }
  const middle = middleEdits(a.slice(start, endA), b.slice(start, endB), most);
  if (!middle) return undefined;
  const same = (index, offset) => [" ", index, index + offset];
  return [
    ...Array.from({ length: start }, (_, index) => same(index, 0)),
    ...middle.map(([sign, x, y]) => [sign, x + start, y + start]),
    ...Array.from({ length: a.length - endA }, (_, index) => same(endA + index, endB - endA)),
  ];
}

function middleEdits(a, b, most) {
  const width = Math.min(a.length + b.length, most);
  const reach = new Int32Array(2 * width + 3);
  const history = [];
  for (let depth = 0; depth <= width; depth++) {
    history.push(reach.slice(width - depth, width + depth + 3));
    for (let diagonal = -depth; diagonal <= depth; diagonal += 2) {
      const at = diagonal + width + 1;
      let x = diagonal === -depth || (diagonal !== depth && reach[at - 1] < reach[at + 1]) ? reach[at + 1] : reach[at - 1] + 1;
      while (x < a.length && x - diagonal < b.length && a[x] === b[x - diagonal]) x++;
      reach[at] = x;
      if (x >= a.length && x - diagonal >= b.length) return walkedBack(history, a.length, b.length);
    }
  }
  return undefined;
}

function walkedBack(history, x, y) {
  const found = [];
  for (let depth = history.length - 1; depth >= 0; depth--) {
    const at = (diagonal) => history[depth][diagonal + depth + 1];
    const diagonal = x - y;
    const down = diagonal === -depth || (diagonal !== depth && at(diagonal - 1) < at(diagonal + 1));
    const from = depth ? (down ? diagonal + 1 : diagonal - 1) : 0;
    const fromX = depth ? at(from) : 0, fromY = depth ? fromX - from : 0;
    while (x > fromX && y > fromY) found.push([" ", --x, --y]);
    if (depth && down) found.push(["+", x, --y]);
    else if (depth) found.push(["-", --x, y]);
  }
  return found.reverse();
}

const CONTEXT = 3;

// Two texts as one table of lines: numbers, sign, line. Long runs of equal lines are folded behind a button.
function differenceTable(before, after, label) {
  const [a, b] = [before.split("\n"), after.split("\n")];
  if (a.at(-1) === "") a.pop();
  if (b.at(-1) === "") b.pop();
  const changes = edits(a, b) ?? [...a.map((_, x) => ["-", x, 0]), ...b.map((_, y) => ["+", a.length, y])];
  const [colouredA, colouredB] = [colouredLines(before), colouredLines(after)];
  const box = document.createElement("div");
  box.className = "scroll code lines";
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", label);
  const table = document.createElement("table");
  table.setAttribute("role", "presentation");
  const body = table.createTBody();
  const near = new Set();
  changes.forEach(([sign], index) => {
    if (sign !== " ") for (let other = index - CONTEXT; other <= index + CONTEXT; other++) near.add(other);
  });
  const line = ([sign, x, y]) => {
    const row = document.createElement("tr");
    row.className = { " ": "same", "-": "gone", "+": "new" }[sign];
    const cell = (text) => { const made = row.insertCell(); made.textContent = text; return made; };
    cell(sign === "+" ? "" : x + 1).className = "at";
    cell(sign === "-" ? "" : y + 1).className = "at";
    cell(sign).className = "sign";
    row.insertCell().append(...nodesOf(sign === "+" ? colouredB[y] : colouredA[x]));
    return row;
  };
  let run = [];
  const flush = () => {
    if (!run.length) return;
    const rows = run;
    run = [];
    if (rows.length < 2 * CONTEXT) return body.append(...rows.map(line));
    const fold = body.insertRow();
    fold.className = "fold-lines";
    const cell = fold.insertCell();
    cell.colSpan = 4;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${rows.length} equal lines`;
    button.addEventListener("click", () => fold.replaceWith(...rows.map(line)));
    cell.append(button);
  };
  changes.forEach((change, index) => {
    if (near.has(index)) { flush(); body.append(line(change)); } else run.push(change);
  });
  flush();
  box.append(table);
  const gone = changes.filter(([sign]) => sign === "-").length, added = changes.filter(([sign]) => sign === "+").length;
  return { box, gone, added };
}

const kernelText = async (anchor) => (await pieceOf(anchor, "kernel"))?.querySelector("pre")?.textContent;
