"use strict";
(() => {
  const root = document.documentElement, form = document.querySelector(".bar form");
  const cards = [...document.querySelectorAll(".card")];
  const fields = ["q", "kind", "rule", "file"].map((name) => form.elements[name]);
  const shown = document.getElementById("shown");

  function apply() {
    const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const card of cards) {
      const fits = ["kind", "rule", "file"].every((name) => {
        const wanted = form.elements[name].value;
        return !wanted || card.dataset[name].split("|").includes(wanted);
      });
      const text = card.dataset.text;
      card.hidden = !(fits && words.every((word) => text.includes(word)));
      count += !card.hidden;
    }
    for (const part of document.querySelectorAll("main section")) {
      part.hidden = part.querySelector(".card") !== null && !part.querySelector(".card:not([hidden])");
    }
    shown.textContent = `${count} of ${cards.length} shown`;
  }

  function keep() { // the filter is part of the address, so that a link can be passed on
    const kept = fields.filter((f) => f.value).map((f) => `${f.name}=${encodeURIComponent(f.value)}`);
    try { history.replaceState(null, "", kept.length ? `#${kept.join("&")}` : location.pathname); } catch { /* sandboxed */ }
  }

  function restore() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const field of fields) field.value = wanted.get(field.name) ?? "";
    for (const field of fields) if (field.selectedIndex === -1) field.value = "";
    apply();
  }

  form.addEventListener("input", () => { apply(); keep(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", restore);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== form.elements.q) { event.preventDefault(); form.elements.q.focus(); }
  });

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { theme.textContent = isDark() ? "light" : "dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  name();
  for (const part of document.querySelectorAll(".scroll")) part.scrollLeft = (part.scrollWidth - part.clientWidth) / 2;
  restore();
})();
