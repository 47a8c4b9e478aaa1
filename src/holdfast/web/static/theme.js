// Light or dark: the user's choice, else the system's. The server reads the cookie, so a page never
// flashes in the wrong theme.

export function switchTheme() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-theme-switch]");
    if (!button) return;
    root.dataset.theme = dark() ? "light" : "dark";
    document.cookie = `hf_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=lax`;
    button.setAttribute("aria-pressed", String(root.dataset.theme === "dark"));
  });
}
