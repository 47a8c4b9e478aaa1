// Buttons that copy the text below them. Browsers allow that on https and localhost only; elsewhere
// the text is selected, for Ctrl-C.

// A tree of JSON has its text without spaces: what is copied is indented.
function written(element) {
  if (!("json" in element.dataset)) return element.textContent;
  try { return JSON.stringify(JSON.parse(element.textContent), null, 2); } catch { return element.textContent; }
}

export function copyTexts() {
  document.documentElement.classList.add("scripts");
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    const text = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(written(text));
      button.textContent = "Copied";
    } catch {
      document.getSelection().selectAllChildren(text);
      button.textContent = "Selected: press Ctrl-C";
    }
  });
}
