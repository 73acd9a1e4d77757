"use strict";
// Adds to each chart a line, a dot on each curve, and a box with the values, below the pointer or by the arrow keys.
(function () {
  const data = JSON.parse(document.getElementById("charts").textContent);
  const make = (tag, kind, parent) => {
    const node = document.createElement(tag);
    node.className = kind;
    parent.appendChild(node);
    return node;
  };
  const nearest = (values, x) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(values[low] - x) <= Math.abs(values[high] - x) ? low : high;
  };
  const format = (chart, value) => {
    if (chart.percent) return (100 * value).toFixed(chart.percent) + "%";
    const size = Math.abs(value);
    return size >= 1e5 || (size > 0 && size < 1e-4) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
  };
  document.querySelectorAll(".area").forEach((area, number) => {
    const chart = data[number], rule = make("div", "rule", area), tip = make("div", "tip", area);
    const dots = chart.lines.map((line) => make("div", "dot k" + line.color, area));
    const longest = chart.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    let index = longest.x.length - 1;
    const position = (value) => {
      const map = chart.log ? (v) => Math.log(Math.max(v, 1e-300)) : (v) => v;
      const low = map(chart.low), high = map(chart.high);
      return high > low ? (map(value) - low) / (high - low) : 0.5;
    };
    const hide = () => [rule, tip, ...dots].forEach((node) => (node.style.display = "none"));
    const show = (x) => {
      const width = area.clientWidth, height = area.clientHeight;
      tip.textContent = "";
      let at = null;
      chart.lines.forEach((line, number) => {
        const point = nearest(line.x, x), dot = dots[number];
        const isNear = Math.abs(line.x[point] - x) <= chart.end / 12;
        dot.style.display = isNear ? "block" : "none";
        if (!isNear) return;
        if (at === null || Math.abs(line.x[point] - x) < Math.abs(at.x - x)) at = { x: line.x[point], step: line.step[point] };
        dot.style.left = (100 * line.x[point]) / chart.end + "%";
        dot.style.top = 100 * (1 - position(line.y[point])) + "%";
        const row = make("div", "", tip);
        make("i", "k" + line.color, row);
        make("span", "", row).textContent = line.name;
        make("b", "", row).textContent = format(chart, line.y[point]);
      });
      if (at === null) return hide();
      const head = document.createElement("div");
      head.textContent = "epoch " + Number(at.x.toFixed(2)) + ", step " + at.step.toLocaleString("en");
      tip.prepend(head);
      rule.style.display = tip.style.display = "block";
      const left = (width * at.x) / chart.end;
      rule.style.left = left + "px";
      const isLeft = left > width / 2;
      tip.style.left = isLeft ? "auto" : Math.min(left + 14, width - 60) + "px";
      tip.style.right = isLeft ? Math.max(width - left + 14, 0) + "px" : "auto";
    };
    const move = (event) => {
      const box = area.getBoundingClientRect();
      show(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * chart.end);
    };
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerdown", move);
    area.addEventListener("pointerleave", hide);
    area.addEventListener("blur", hide);
    area.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Escape") return hide();
      if (by === undefined) return;
      event.preventDefault();
      index = Math.min(longest.x.length - 1, Math.max(0, index + by));
      show(longest.x[index]);
    });
  });
})();
