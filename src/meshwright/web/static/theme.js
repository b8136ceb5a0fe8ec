// Before anything is drawn: the colors that were chosen last.
(() => {
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch {
    // A browser that keeps nothing follows the system.
  }
})();
