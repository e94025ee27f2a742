// What a page gets once it is shown: colours, diffs, folds that fill themselves, tips.

function choice(label, names, chosen) {
  const outer = document.createElement("label");
  const select = document.createElement("select");
  select.append(...names.map((name) => new Option(name, name, false, name === chosen)));
  outer.append(`${label} `, select);
  return [outer, select];
}

async function kernels(place) {
  const sides = Object.fromEntries(place.dataset.sides.split(" ").map((side) => side.split("=")));
  const names = Object.keys(sides);
  const bar = document.createElement("p");
  bar.className = "filters";
  const [from, before] = choice("from", ["nothing", ...names], "baseline");
  const [to, after] = choice("to", names, "treatment");
  const count = document.createElement("output");
  bar.append(from, to, count);
  const view = document.createElement("div");
  const draw = async () => {
    const [old, fresh] = [before.value === "nothing" ? "" : await kernelText(sides[before.value]), await kernelText(sides[after.value])];
    if (old === undefined || fresh === undefined) {
      count.textContent = "";
      return view.replaceChildren(note(`The ${old === undefined ? before.value : after.value} left no kernel.`));
    }
    const { box, gone, added } = differenceTable(old, fresh, `Kernel, from ${before.value} to ${after.value}`);
    count.textContent = gone + added ? `lines: ${gone} gone, ${added} new` : "the two kernels are the same";
    view.replaceChildren(box);
  };
  bar.addEventListener("change", draw);
  place.replaceChildren(bar, view);
  await draw();
}

// A submission shows what changed since the one before it; the whole is a click away.
function sent(details) {
  const whole = details.querySelector("pre");
  if (!whole || details.dataset.drawn) return;
  details.dataset.drawn = "yes";
  const before = all("details.sent", details.closest(".timeline")).filter(
    (other) => other.compareDocumentPosition(details) & Node.DOCUMENT_POSITION_FOLLOWING).at(-1)?.querySelector("pre");
  colour(whole);
  if (!before) return;
  const { box, gone, added } = differenceTable(before.textContent, whole.textContent, "Changes since the submission before");
  const button = document.createElement("button");
  button.type = "button";
  const label = () => { button.textContent = whole.hidden ? "Show all of it" : `Show what changed (lines: ${gone} gone, ${added} new)`; };
  whole.hidden = true;
  button.addEventListener("click", () => { whole.hidden = !whole.hidden; box.hidden = !whole.hidden; label(); });
  label();
  whole.before(button, box);
}

function opened(details) {
  if (details.matches(".sent")) sent(details);
  all(":scope > pre.code:not(.coloured)", details).forEach(colour);
}

function tips(within) {
  const tip = byId("tip");
  for (const mark of all("figure svg [aria-label]", within)) {
    if (mark.getAttribute("role") !== "graphics-symbol") continue;
    mark.addEventListener("pointermove", (event) => {
      tip.textContent = mark.getAttribute("aria-label");
      tip.hidden = false;
      tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 12))}px`;
      tip.style.top = `${event.clientY + 14}px`;
    });
    mark.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
}

function dressed(page, query) {
  const form = page.querySelector("form[data-filters]");
  all("table.sortable", page).forEach((table) => { if (table.id !== form?.dataset.filters) sortable(table); });
  if (form) filterable(form, query);
  all(".piece > pre.code", page).forEach(colour);
  all(".difference", page).forEach(kernels);
  tips(page);
}
