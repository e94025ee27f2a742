// Sorting, filtering, and both kept in the address.

function sortable(table, { by, falling, sorted } = {}) {
  const rows = table.tBodies[0];
  const heads = all("thead th", table);
  const names = heads.map((head) => head.textContent.trim());
  const sort = (column, sign) => {
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what is undefined stays last
      const [m, n] = [Number(x), Number(y)];
      return sign * (Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y, "en", { numeric: true }) : m - n);
    };
    rows.append(...[...rows.rows].sort(compare));
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = names[column];
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      sort(column, sign);
      sorted?.(names[column], sign);
    });
  });
  if (by && names.includes(by)) sort(names.indexOf(by), falling ? -1 : 1);
}

// A form of words and choices over a table; what is chosen stands in the address, so that it can be sent to somebody.
function filterable(form, query) {
  const table = byId(form.dataset.filters);
  const columns = Object.fromEntries(all("thead th", table).map((head, index) => [head.textContent.trim(), index]));
  const texts = [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
  const fields = [...form.elements].filter((field) => field.name);
  for (const field of fields) if (query.has(field.name)) field.value = query.get(field.name);
  const remember = () => {
    const wanted = new URLSearchParams(fields.filter((field) => field.value).map((field) => [field.name, field.value]));
    if (query.has("sort")) wanted.set("sort", query.get("sort"));
    const text = wanted.toString();
    history.replaceState(history.state, "", `#comparisons${text && `?${text}`}`);
  };
  const apply = () => {
    const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const choices = fields.filter((field) => field.name !== "q" && field.value);
    let count = 0;
    for (const [row, text] of texts) {
      const fits = choices.every((field) => row.cells[columns[field.name]].textContent === field.value);
      row.hidden = !(fits && words.every((word) => text.includes(word)));
      count += !row.hidden;
    }
    byId("found").textContent = `${count} ${count === 1 ? "row" : "rows"}`;
  };
  form.addEventListener("input", () => { apply(); remember(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  sortable(table, {
    by: query.get("sort")?.replace(/^-/, ""),
    falling: query.get("sort")?.startsWith("-"),
    sorted: (name, sign) => { query.set("sort", `${sign === 1 ? "" : "-"}${name}`); remember(); },
  });
  apply();
}
