// The theme makes these elements while the page runs: tables that scroll, and the copy button of every code block.
"use strict";

const complete = () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.tabIndex = 0;
  document.querySelectorAll(".md-code__nav").forEach((nav, n) => nav.setAttribute("aria-label", `Code block ${n + 1}`));
};
new MutationObserver(complete).observe(document.querySelector("article"), { childList: true, subtree: true });
complete();
