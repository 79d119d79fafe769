"use strict";
// The page is complete without this: it adds a readable card over a token, arrow keys, and a filter of the table.
(function () {
  const card = document.createElement("div");
  card.id = "card";
  card.setAttribute("role", "tooltip");
  card.hidden = true;
  document.body.append(card);
  let shown = null;

  function facts(chip) {
    return chip.dataset.facts || chip.title;
  }

  function place() {
    if (!shown) return;
    const box = shown.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - card.offsetWidth - 8);
    const above = box.top - card.offsetHeight - 8;
    card.style.left = left + "px";
    card.style.top = (above > 8 ? above : box.bottom + 8) + "px";
  }

  function show(chip) {
    if (shown === chip) return;
    hide();
    shown = chip;
    // The browser's own tooltip would lie over the card.
    chip.dataset.facts = facts(chip);
    chip.removeAttribute("title");
    const head = document.createElement("p");
    head.className = "token " + chip.classList[1];
    head.textContent = chip.textContent;
    const list = document.createElement("dl");
    for (const line of chip.dataset.facts.split("\n")) {
      const cut = line.indexOf(": ");
      const name = document.createElement("dt");
      const value = document.createElement("dd");
      name.textContent = line.slice(0, cut);
      value.textContent = line.slice(cut + 2);
      list.append(name, value);
    }
    card.replaceChildren(head, list);
    card.hidden = false;
    place();
    chip.setAttribute("aria-describedby", "card");
  }

  function hide() {
    if (!shown) return;
    shown.title = shown.dataset.facts;
    shown.removeAttribute("aria-describedby");
    shown = null;
    card.hidden = true;
  }

  for (const passage of document.querySelectorAll(".tokens")) {
    const chips = Array.from(passage.querySelectorAll(".t"));
    if (!chips.length) continue;
    // One stop for the tab key a passage; the arrows move inside it.
    let current = 0;
    chips.forEach((chip) => (chip.tabIndex = -1));
    chips[0].tabIndex = 0;
    passage.addEventListener("pointerover", (event) => {
      const chip = event.target.closest(".t");
      if (chip) show(chip);
      else hide();
    });
    passage.addEventListener("pointerleave", hide);
    passage.addEventListener("focusin", (event) => {
      if (event.target.matches(".t")) show(event.target);
    });
    passage.addEventListener("focusout", hide);
    passage.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      let next = step === undefined ? null : current + step;
      if (event.key === "Home") next = 0;
      if (event.key === "End") next = chips.length - 1;
      if (next === null) return;
      event.preventDefault();
      chips[current].tabIndex = -1;
      current = Math.min(Math.max(next, 0), chips.length - 1);
      chips[current].tabIndex = 0;
      chips[current].focus();
    });
    passage.addEventListener("click", (event) => {
      const chip = event.target.closest(".t");
      if (!chip) return;
      chips[current].tabIndex = -1;
      current = chips.indexOf(chip);
      chip.tabIndex = 0;
      chip.focus();
    });
  }
  addEventListener("scroll", place, { passive: true });

  const table = document.querySelector("table.gaps");
  if (table) {
    const box = document.createElement("input");
    box.type = "search";
    box.className = "filter";
    box.placeholder = "Filter by name or framework";
    box.setAttribute("aria-label", box.placeholder);
    table.parentElement.before(box);
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const body of table.tBodies) {
        const source = body.rows[0].textContent.toLowerCase();
        let kept = 0;
        for (const row of Array.from(body.rows).slice(1)) {
          const text = source + " " + row.cells[0].textContent.toLowerCase();
          row.hidden = !words.every((word) => text.includes(word));
          kept += row.hidden ? 0 : 1;
        }
        body.hidden = kept === 0;
      }
    });
  }
})();
