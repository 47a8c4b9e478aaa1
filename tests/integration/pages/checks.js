// What is asked of every page. Each returns a list of what is wrong.

window.checks = {
  // Texts with less contrast than WCAG AA asks for.
  faint: () => {
  const parse = (text) => {
    const m = text.match(/rgba?\(([^)]+)\)|color\(srgb ([^)]+)\)/);
    if (!m) return null;
    const n = (m[1] || m[2]).split(/[ ,/]+/).filter(Boolean).map(Number);
    return m[1] ? [n[0], n[1], n[2], n[3] ?? 1] : [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3])).concat(1);
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour && colour[3] > 0) layers.push(colour);
      if (colour && colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || element.closest(".unseen, :disabled, option, datalist, dialog:not([open]), title, script, .skip")) continue;
    if (!element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const inSvg = element.closest("svg");
    const back = ground(inSvg ? inSvg.parentElement : element);
    const fore = over(parse(inSvg ? style.fill : style.color) || [0, 0, 0, 1], back);
    const [a, b] = [light(fore), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) faint.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)} (${style.color} on ${back})`);
  }
  return faint;
},
  // Links, buttons, fields, pictures and tables without a name; ids that occur twice.
  nameless: () => {
  const named = (e) => (e.getAttribute("aria-label") || e.title || e.textContent.trim() || e.value || "").length > 0;
  const bad = [];
  for (const e of document.querySelectorAll("a[href], button")) if (!named(e)) bad.push(e.outerHTML.slice(0, 90));
  for (const e of document.querySelectorAll("input:not([type=hidden]), select, textarea"))
    if (!e.labels?.length && !e.getAttribute("aria-label")) bad.push(e.outerHTML.slice(0, 90));
  for (const e of document.querySelectorAll("svg"))
    if (!e.getAttribute("aria-label") && e.getAttribute("aria-hidden") !== "true") bad.push(e.outerHTML.slice(0, 90));
  for (const e of document.querySelectorAll("table")) if (!e.caption) bad.push("a table without a caption");
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of ids.filter((id, n) => ids.indexOf(id) !== n)) bad.push(`the id ${id} twice`);
  return bad;
},
  // Scripts and styles that stand in the page itself.
  inline: () => [...document.querySelectorAll("*")].filter((e) =>
  e.hasAttribute("style") || [...e.attributes].some((a) => a.name.startsWith("on"))
  || (e.tagName === "SCRIPT" && !e.src) || e.tagName === "STYLE").map((e) => e.outerHTML.slice(0, 90)),
  // Whatever was loaded from elsewhere.
  foreign: () => performance.getEntriesByType("resource").map((e) => e.name).filter((n) => new URL(n).host !== location.host),
};
