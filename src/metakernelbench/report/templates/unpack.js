// What `packing.py` packed: Base85, and in it bzip2. Browsers inflate by themselves, but bzip2 takes a third less.

// Five digits for four bytes, the last group short.
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;.=>?@^_`{|}~";
const VALUES = new Uint8Array(128);
[...DIGITS].forEach((digit, value) => { VALUES[digit.charCodeAt(0)] = value; });
function bytesOf(text) {
  const groups = Math.ceil(text.length / 5);
  const view = new DataView(new ArrayBuffer(4 * groups));
  for (let group = 0; group < groups; group++) {
    let value = 0;
    for (let place = 5 * group; place < 5 * group + 5; place++) value = value * 85 + (place < text.length ? VALUES[text.charCodeAt(place)] : 84);
    view.setUint32(4 * group, value);
  }
  return new Uint8Array(view.buffer, 0, 4 * groups - (5 * groups - text.length));
}

// A reader of up to 24 bits at a time, the highest first.
function bitsOf(bytes) {
  let at = 0, kept = 0, left = 0;
  return (count) => {
    while (left < count) {
      if (at === bytes.length) throw new Error("a part of this report is cut off");
      kept = ((kept & 0xffffff) << 8) | bytes[at++];
      left += 8;
    }
    left -= count;
    return (kept >>> left) & ((1 << count) - 1);
  };
}

function unpacked(text) {
  const bits = bitsOf(bytesOf(text));
  const size = 100000 * (bits(24) === 0x425a68 ? bits(8) - 48 : NaN); // "BZh" and a digit
  const blocks = [];
  for (;;) {
    const magic = bits(24);
    bits(24), bits(16), bits(16); // the rest of the magic number, and a checksum
    if (magic !== 0x314159) break;
    blocks.push(blockOf(bits, size));
  }
  return new Blob(blocks).text();
}

const ONES = (count, bits) => Array.from({ length: count }, () => bits(1));
const GROUP = 50; // symbols in a row that share a code

// One block: codes, then runs and places in a list that moves what was used to its front, then a sorted rotation.
function blockOf(bits, size) {
  bits(1); // randomised, which no compressor does any more
  const origin = bits(24);
  const rows = ONES(16, bits);
  const used = rows.flatMap((row, high) => row ? ONES(16, bits).flatMap((one, low) => one ? [16 * high + low] : []) : []);
  const count = bits(3);
  const order = [...Array(count).keys()];
  const chosen = Array.from({ length: bits(15) }, () => {
    let place = 0;
    while (bits(1)) place++;
    order.unshift(...order.splice(place, 1));
    return order[0];
  });
  const codes = Array.from({ length: count }, () => codeOf(bits, used.length + 2));
  return unrun(unsorted(...symbols(bits, codes, chosen, used, size), origin));
}

// A canonical Huffman code: how many symbols have each length, and the symbols in the order of their codes.
function codeOf(bits, symbols) {
  let length = bits(5);
  const lengths = Array.from({ length: symbols }, () => {
    while (bits(1)) length += bits(1) ? -1 : 1;
    return length;
  });
  const counts = new Uint16Array(21);
  for (const one of lengths) counts[one]++;
  return { counts, sorted: lengths.map((_, symbol) => symbol).sort((a, b) => lengths[a] - lengths[b] || a - b) };
}

function symbolOf(bits, { counts, sorted }) {
  let code = 0, first = 0, index = 0;
  for (let length = 1; length < counts.length; length++) {
    code |= bits(1);
    if (code - first < counts[length]) return sorted[index + code - first];
    index += counts[length];
    first = (first + counts[length]) << 1;
    code <<= 1;
  }
  throw new Error("a part of this report is damaged");
}

// The bytes of the sorted rotation, how many there are, and how often each occurs.
function symbols(bits, codes, chosen, used, size) {
  const bytes = new Uint32Array(size), often = new Uint32Array(256), front = Uint8Array.from(used);
  const end = used.length + 1;
  let total = 0, run = 0, weight = 1;
  for (let number = 0; ; number++) {
    const symbol = symbolOf(bits, codes[chosen[Math.floor(number / GROUP)]]);
    if (symbol < 2) { // a digit of a run's length, the lowest first
      run += weight << symbol;
      weight <<= 1;
      continue;
    }
    if (run) {
      bytes.fill(front[0], total, total + run);
      often[front[0]] += run;
      total += run;
      [run, weight] = [0, 1];
    }
    if (symbol === end) return [bytes, total, often];
    const byte = front[symbol - 1];
    front.copyWithin(1, 0, symbol - 1);
    front[0] = byte;
    often[byte]++;
    bytes[total++] = byte;
  }
}

// Burrows and Wheeler's transform, undone.
function unsorted(bytes, total, often, origin) {
  const starts = new Uint32Array(256);
  for (let byte = 1; byte < 256; byte++) starts[byte] = starts[byte - 1] + often[byte - 1];
  for (let index = 0; index < total; index++) bytes[starts[bytes[index] & 0xff]++] |= index << 8;
  const found = new Uint8Array(total);
  let place = total ? bytes[origin] >>> 8 : 0;
  for (let index = 0; index < total; index++) {
    found[index] = bytes[place] & 0xff;
    place = bytes[place] >>> 8;
  }
  return found;
}

// After four equal bytes stands how many more there are.
function unrun(bytes) {
  let length = 0, equal = 0;
  const lengths = [];
  bytes.forEach((byte, index) => {
    if (equal === 4) { lengths.push([length, byte]); length += byte; equal = 0; return; }
    equal = index && byte === bytes[index - 1] && equal ? equal + 1 : 1;
    length++;
  });
  if (!lengths.length) return bytes;
  const found = new Uint8Array(length);
  let from = 0, to = 0;
  for (const [at, more] of [...lengths, [length, 0]]) {
    const plain = at - to;
    found.set(bytes.subarray(from, from + plain), to);
    found.fill(plain ? found[at - 1] : 0, at, at + more);
    from += plain + 1;
    to = at + more;
  }
  return found;
}
