// Pages: which one an address names, where its part is, and showing it.

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const byId = (id) => document.getElementById(id);
const live = "live" in document.body.dataset;
const main = byId("page");
const loaded = new Map(); // part → DocumentFragment, or JSON text for `search`

// An address is an id, perhaps with a query: "comparisons?model=a".
function addressOf(hash) {
  let text = hash.replace(/^#/, "");
  try { text = decodeURIComponent(text); } catch { /* an address that somebody mistyped */ }
  const [id, query = ""] = hash.replace(/^#/, "").split("?");
  return { id: id === text.split("?")[0] ? id : text.split("?")[0], query: new URLSearchParams(query) };
}
const partOf = (id) => id.split(".")[0];

async function textOf(part) {
  if (live) {
    const answer = await fetch(`part/${encodeURIComponent(part)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`The server has no page ${part}`);
    return answer.text();
  }
  embedded ??= JSON.parse(byId("parts").textContent);
  if (!Object.hasOwn(embedded, part)) throw new Error(`there is no page ${part}`);
  return unpacked(embedded[part]);
}
let embedded;

// The parts are HTML of the program's own templates, in which texts of agents were escaped.
async function part(name) {
  if (!loaded.has(name)) {
    const template = document.createElement("template");
    template.innerHTML = await textOf(name);
    loaded.set(name, template.content);
    if (loaded.size > 12) loaded.delete([...loaded.keys()].find((key) => key !== "overview" && key !== name));
  }
  return loaded.get(name);
}

async function pieceOf(anchor, piece) {
  try {
    return (await part(partOf(anchor))).getElementById(anchor)?.querySelector(`[data-is="${piece}"]`)?.cloneNode(true);
  } catch {
    return undefined;
  }
}

async function filled(page) {
  for (const slot of all("[data-of]", page)) {
    const piece = await pieceOf(slot.dataset.of, slot.dataset.piece);
    if (piece) slot.replaceWith(piece);
    else if (slot.dataset.piece !== "picture") slot.replaceWith(note("none"));
    else slot.remove();
  }
  return page;
}

function note(text) {
  const made = document.createElement("p");
  made.className = "quiet";
  made.textContent = text;
  return made;
}

async function pageAt(id) {
  const pages = await part(partOf(id));
  const found = (pages.getElementById(id) ?? pages.getElementById(partOf(id)))?.closest("article.page");
  if (!found) throw new Error(`there is no page ${id}`);
  return filled(found.cloneNode(true));
}

function missing(error) {
  const page = document.createElement("article");
  page.className = "page";
  page.innerHTML = "<h1>No such page</h1><p class=lead></p><p><a href='#overview'>To the overview</a></p>";
  page.querySelector(".lead").textContent = `${error.message}.`;
  return page;
}

let shown = 0;
const places = new Map(); // where each entry of the history was scrolled to

async function show(hash, { keep = false } = {}) {
  const turn = ++shown;
  const { id, query } = addressOf(hash || "#overview");
  const page = await pageAt(id).catch(missing);
  if (turn !== shown) return; // somebody has gone on meanwhile
  if (keep && page.isEqualNode(untouched)) return;
  untouched = page.cloneNode(true);
  const state = keep ? remembered(main) : undefined;
  main.replaceChildren(page);
  if (turn > 1 && !keep) main.focus({ preventScroll: true });
  document.title = `${page.dataset.title && id !== "overview" ? `${page.dataset.title} · ` : ""}${document.body.dataset.name} · MetaKernelBench`;
  for (const link of all("header.bar nav a")) {
    if (link.hash === `#${id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  dressed(page, query);
  if (state) return restored(main, state);
  const inside = id.includes(".") && page.id !== id ? byId(id) : undefined;
  const place = places.get(history.state?.entry);
  if (inside) inside.scrollIntoView();
  else scrollTo({ top: place ?? 0, behavior: "instant" });
}
let untouched;

// What a reader has opened, typed and scrolled to, kept when a live page is replaced by a newer one.
const openable = (within) => all("details", within);
function remembered(within) {
  return {
    open: openable(within).map((details) => details.open && details.querySelector("summary").textContent),
    focus: all("a, button, input, select, summary, [tabindex]", within).indexOf(document.activeElement),
    scroll: scrollY,
    inner: all(".scroll, pre", within).map((box) => [box.scrollLeft, box.scrollTop]),
  };
}
function restored(within, state) {
  openable(within).forEach((details, index) => { details.open ||= details.querySelector("summary").textContent === state.open[index]; });
  all(".scroll, pre", within).forEach((box, index) => { [box.scrollLeft, box.scrollTop] = state.inner[index] ?? [0, 0]; });
  if (state.focus >= 0) all("a, button, input, select, summary, [tabindex]", within)[state.focus]?.focus({ preventScroll: true });
  scrollTo({ top: state.scroll, behavior: "instant" });
}

// Every entry of the history has a number, so that going back finds the place where one was.
let entries = Number(sessionStorage.getItem("entries") ?? 0);
function numbered() {
  if (history.state?.entry === undefined) {
    history.replaceState({ entry: ++entries }, "");
    sessionStorage.setItem("entries", entries);
  }
}
addEventListener("scroll", () => {
  if (history.state?.entry !== undefined && main.firstElementChild) places.set(history.state.entry, scrollY);
}, { passive: true });
