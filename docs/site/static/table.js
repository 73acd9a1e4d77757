// Writes the name of its column to each cell but a row's first, which phones show (site.css).
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table.table")) {
    const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, index) => {
        if (index > 0 && names[index]) cell.dataset.column = names[index];
      });
    }
  }
});
