"use strict";
// Makes the tables sortable: the head of each column becomes a button that sorts its rows, first up, then down, then
// as they were. Without scripts the tables are as they are.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  if (original.length > 1) {
    for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" };
        const order = next[head.getAttribute("aria-sort")];
        for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        body.append(...sorted(original, column, order));
      });
    }
  }
}

function sorted(rows, column, order) {
  if (order === "none") return rows;
  const sign = order === "ascending" ? 1 : -1;
  const known = rows.filter((row) => value(row, column) !== "");
  known.sort((a, b) => sign * compare(value(a, column), value(b, column)));
  return [...known, ...rows.filter((row) => value(row, column) === "")]; // what is not known comes last either way
}

// A cell sorts by the exact number that it rounds, where it has one ("" where there is none), else by its text.
function value(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value ?? cell.textContent.trim();
}

function compare(a, b) {
  const difference = a - b;
  return Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference;
}
