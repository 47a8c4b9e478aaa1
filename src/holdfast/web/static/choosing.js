// Selecting many rows: one checkbox for all of them, and how many are selected.

function count(form) {
  const boxes = [...form.querySelectorAll("tbody input[type=checkbox]")];
  const chosen = boxes.filter((box) => box.checked).length;
  for (const one of form.querySelectorAll("[data-chosen]")) one.textContent = chosen ? `${chosen} selected` : "none selected";
  for (const button of form.querySelectorAll("button[data-needs]")) button.disabled = !chosen;
  const all = form.querySelector("input[data-all]");
  if (all) { all.checked = chosen > 0 && chosen === boxes.length; all.indeterminate = chosen > 0 && chosen < boxes.length; }
}

export function chooseMany() {
  const forms = () => document.querySelectorAll("form[data-choose]");
  document.addEventListener("change", (event) => {
    const form = event.target.closest("form[data-choose]");
    if (!form) return;
    if (event.target.matches("input[data-all]")) {
      for (const box of form.querySelectorAll("tbody input[type=checkbox]")) box.checked = event.target.checked;
    }
    count(form);
  });
  document.addEventListener("renewed", () => forms().forEach(count));
  forms().forEach(count);
}
