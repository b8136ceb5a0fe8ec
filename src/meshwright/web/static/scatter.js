// Predicted against measured, on equal logarithmic axes. Thousands of points and no library: the page is ready at once.
"use strict";

const scatter = { pad: { left: 52, right: 12, top: 10, bottom: 42 }, plots: new Map(), wanted: "" };

scatter.ticks = ([low, high]) => {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) all.push(10 ** power);
  const inside = all.filter((one) => one >= low * 0.999 && one <= high * 1.001);
  return inside.length > 2 ? inside : all.flatMap((one) => [one, 2 * one, 5 * one]).filter((one) => one >= low && one <= high);
};

scatter.draw = (place) => {
  const plot = scatter.plots.get(place.id);
  const { pad } = scatter;
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const canvas = place.querySelector("canvas");
  const [width, height, dense] = [place.clientWidth, place.clientHeight, window.devicePixelRatio || 1];
  if (!width) return;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  const [low, high] = plot.data.domain.map(Math.log10);
  plot.x = (value) => pad.left + ((Math.log10(value) - low) / (high - low)) * (width - pad.left - pad.right);
  plot.y = (value) => height - pad.bottom - ((Math.log10(value) - low) / (high - low)) * (height - pad.top - pad.bottom);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = color("--soft");
  pen.strokeStyle = color("--line");
  const line = (x1, y1, x2, y2) => { pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x2, y2); pen.stroke(); };
  for (const value of scatter.ticks(plot.data.domain)) {
    const [x, y] = [plot.x(value), plot.y(value)];
    const text = String(Number(value.toPrecision(1)));
    line(x, pad.top, x, height - pad.bottom);
    line(pad.left, y, width - pad.right, y);
    pen.textAlign = "center";
    pen.fillText(text, x, height - pad.bottom + 15);
    pen.textAlign = "right";
    pen.fillText(text, pad.left - 6, y + 4);
  }
  pen.textAlign = "center";
  pen.fillText(`measured, ${plot.data.unit}`, (pad.left + width - pad.right) / 2, height - 8);
  pen.save();
  pen.translate(12, (pad.top + height - pad.bottom) / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText(`predicted, ${plot.data.unit}`, 0, 0);
  pen.restore();
  const shades = [1, 4, 6, 3, 5, 2, 8, 7].map((n) => color(`--c${n}`));
  pen.globalAlpha = 0.6;
  shades.forEach((shade, number) => { // one path of each color: thousands of fills would block the page
    pen.fillStyle = shade;
    pen.beginPath();
    for (const [source, , measured, predicted] of plot.shown) {
      if (source % shades.length !== number) continue;
      const [x, y] = [plot.x(measured), plot.y(predicted)];
      pen.moveTo(x + 2.4, y);
      pen.arc(x, y, 2.4, 0, 7);
    }
    pen.fill();
  });
  pen.globalAlpha = 1;
  pen.strokeStyle = color("--ink"); // over the points: equal values
  pen.setLineDash([4, 4]);
  line(plot.x(plot.data.domain[0]), plot.y(plot.data.domain[0]), plot.x(plot.data.domain[1]), plot.y(plot.data.domain[1]));
  place.dataset.drawn = "yes";
};

scatter.choose = (wanted) => {
  for (const [id, plot] of scatter.plots) {
    const source = plot.data.sources.indexOf(wanted);
    plot.shown = wanted ? plot.data.points.filter((one) => one[0] === source) : plot.data.points;
    scatter.draw(document.getElementById(id));
  }
};

// The point under the pointer: its source, GPU and values.
scatter.note = document.createElement("div");
scatter.note.className = "meaning";
scatter.note.hidden = true;
scatter.point = (place, event) => {
  const plot = scatter.plots.get(place.id);
  const at = place.getBoundingClientRect();
  const [x, y] = [event.clientX - at.left, event.clientY - at.top];
  let [near, best] = [null, 12];
  for (const one of plot.shown) {
    const away = Math.hypot(plot.x(one[2]) - x, plot.y(one[3]) - y);
    if (away < best) [near, best] = [one, away];
  }
  scatter.note.hidden = !near;
  if (!near) return;
  const { unit, sources, gpus } = plot.data;
  const error = 100 * (near[3] / near[2] - 1);
  scatter.note.textContent = `${sources[near[0]]}, ${gpus[near[1]]}: measured ${near[2]}, predicted ${near[3]} ${unit} (${error < 0 ? "" : "+"}${error.toFixed(0)} %)`;
  scatter.note.style.left = `${Math.max(8, Math.min(event.clientX + 12, document.documentElement.clientWidth - scatter.note.offsetWidth - 8)) + scrollX}px`;
  scatter.note.style.top = `${event.clientY + 14 + scrollY}px`;
};

document.addEventListener("DOMContentLoaded", () => {
  document.body.append(scatter.note);
  for (const place of document.querySelectorAll(".scatter")) {
    const data = JSON.parse(document.getElementById(`${place.id}-data`).textContent);
    scatter.plots.set(place.id, { data, shown: data.points });
    place.append(document.createElement("canvas"));
    place.addEventListener("pointermove", (event) => scatter.point(place, event));
    place.addEventListener("pointerleave", () => { scatter.note.hidden = true; });
    new ResizeObserver(() => scatter.draw(place)).observe(place);
  }
});
document.addEventListener("theme", () => {
  for (const id of scatter.plots.keys()) scatter.draw(document.getElementById(id));
});
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-source]")) scatter.choose(event.target.value);
});
