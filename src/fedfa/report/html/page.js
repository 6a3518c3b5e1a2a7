(function () {
  "use strict";
  var root = document.documentElement, SVG = "http://www.w3.org/2000/svg";
  function store(kind) { try { return window[kind]; } catch (error) { return null; } }
  var local = store("localStorage"), session = store("sessionStorage");
  function get(where, key) { try { return where && where.getItem(key); } catch (error) { return null; } }
  function put(where, key, value) { try { if (where) where.setItem(key, value); } catch (error) { /* private mode */ } }

  // -- theme: light, dark, or that of the system
  var themes = ["system", "light", "dark"], button = document.getElementById("theme");
  function show(theme) {
    if (theme === "light" || theme === "dark") root.setAttribute("data-theme", theme);
    else { theme = "system"; root.removeAttribute("data-theme"); }
    if (button) { button.textContent = "Colours: " + theme; button.hidden = false; button.dataset.now = theme; }
  }
  show(get(local, "fedfa-theme"));
  if (button) button.addEventListener("click", function () {
    var next = themes[(themes.indexOf(button.dataset.now) + 1) % themes.length];
    put(local, "fedfa-theme", next);
    show(next);
  });

  // -- keep scroll position and open tables across reloads
  var here = "fedfa-place " + location.pathname;
  if (root.hasAttribute("data-live")) window.addEventListener("pagehide", function () {
    var open = [].map.call(document.querySelectorAll("details[open]"), function (one) { return one.id; });
    put(session, here, JSON.stringify({ y: window.scrollY, open: open }));
  });
  var before = get(session, here);
  if (before) {
    try {
      session.removeItem(here);
      before = JSON.parse(before);
      before.open.forEach(function (id) { var one = document.getElementById(id); if (one) one.open = true; });
      if ("scrollRestoration" in history) history.scrollRestoration = "manual";
      window.scrollTo(0, before.y);
    } catch (error) { /* state of an older page */ }
  }

  // -- values under the pointer
  var tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; tip.setAttribute("role", "status");
  document.body.appendChild(tip);
  function element(name, text, parent) {
    var made = document.createElement(name);
    if (text !== null) made.textContent = text;
    parent.appendChild(made);
    return made;
  }
  function words(value) {
    if (value === null || value === undefined) return "–";
    var size = Math.abs(value);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return size >= 1000 ? Math.round(value).toLocaleString("en") : size >= 1 ? value.toFixed(2) : String(+value.toPrecision(3));
  }
  function at(x, svg, plot, back) {
    var low = plot.x[0], high = plot.x[1];
    if (back) { return low + (x - plot.r[0]) / plot.r[2] * (high - low); }
    return plot.r[0] + (x - low) / (high - low) * plot.r[2];
  }
  function clear(svg) {
    [].forEach.call(svg.querySelectorAll(".cross,.cell"), function (one) { one.remove(); });
    svg.classList.remove("dim");
    tip.hidden = true;
  }
  function place(svg, x, y) {
    var box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    tip.hidden = false;
    var left = box.left + x * scale + 14, top = box.top + y * scale + 14;
    if (left + tip.offsetWidth > root.clientWidth - 8) left = box.left + x * scale - tip.offsetWidth - 14;
    left = Math.max(8, Math.min(left, root.clientWidth - tip.offsetWidth - 8));
    if (top + tip.offsetHeight > window.innerHeight - 8) top = Math.max(8, window.innerHeight - tip.offsetHeight - 8);
    tip.style.left = left + window.scrollX + "px";
    tip.style.top = top + window.scrollY + "px";
  }
  function readLine(svg, plot, data, value, y) {
    var places = [];
    data.s.forEach(function (one) {
      one.p.forEach(function (p) { places.push(p[0]); });
      if (one.after) places.push(one.after[0]);
    });
    if (!places.length) return null;
    var nearest = places.reduce(function (a, b) { return Math.abs(b - value) < Math.abs(a - value) ? b : a; });
    var width = plot.x[1] - plot.x[0], rows = [];
    data.s.forEach(function (one) {
      var points = one.after ? one.p.concat([one.after]) : one.p;
      var best = points.reduce(function (a, b) { return Math.abs(b[0] - nearest) < Math.abs(a[0] - nearest) ? b : a; });
      if (Math.abs(best[0] - nearest) <= width * 0.02) rows.push([one, best]);
    });
    rows.sort(function (a, b) { return b[1][1] - a[1][1]; });
    clear(svg);
    var cross = document.createElementNS(SVG, "line"), x = at(nearest, svg, plot, false);
    cross.setAttribute("class", "cross");
    cross.setAttribute("x1", x); cross.setAttribute("x2", x);
    cross.setAttribute("y1", plot.r[1]); cross.setAttribute("y2", plot.r[1] + plot.r[3]);
    svg.appendChild(cross);
    tip.textContent = "";
    element("b", data.x + " " + words(nearest), tip);
    rows.slice(0, 16).forEach(function (row) {
      var line = element("div", null, tip), mark = element("i", null, line);
      mark.style.background = "var(--" + row[0].c + ")";
      element("span", row[0].n, line);
      var p = row[1], range = p.length > 3 && p[2] < p[3] ? " (" + words(p[2]) + " to " + words(p[3]) + ")" : "";
      element("span", words(p[1]) + data.u + range, line);
    });
    place(svg, x, y);
    return nearest;
  }
  function readHeat(svg, plot, data, x, y) {
    var column = Math.floor((x - plot.r[0]) / plot.r[2] * data.cols.length);
    var row = Math.floor((y - plot.r[1]) / plot.r[3] * data.rows.length);
    if (!data.v[row] || column < 0 || column >= data.cols.length) return;
    clear(svg);
    var cell = document.createElementNS(SVG, "rect"), w = plot.r[2] / data.cols.length, h = plot.r[3] / data.rows.length;
    cell.setAttribute("class", "cell");
    cell.setAttribute("x", plot.r[0] + column * w); cell.setAttribute("y", plot.r[1] + row * h);
    cell.setAttribute("width", w); cell.setAttribute("height", h);
    svg.appendChild(cell);
    tip.textContent = "";
    element("b", (data.rw ? data.rw + " " : "") + data.rows[row], tip);
    element("span", (data.cw ? data.cw + " " : "") + data.cols[column] + ": " + (data.v[row][column] === null ? "none" : words(data.v[row][column]) + data.u), tip);
    place(svg, x, y);
  }
  [].forEach.call(document.querySelectorAll("figure"), function (figure) {
    var source = figure.querySelector("script.values");
    var data = source ? JSON.parse(source.textContent) : [];
    [].forEach.call(figure.querySelectorAll("svg.drawing"), function (svg) {
      var plots = JSON.parse(svg.dataset.plots || "[]"), now = null;
      function move(event) {
        var box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
        var x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
        var plot = plots.find(function (one) {
          return x >= one.r[0] - 4 && x <= one.r[0] + one.r[2] + 4 && y >= one.r[1] - 4 && y <= one.r[1] + one.r[3] + 4;
        });
        if (!plot || !data[plot.p]) { clear(svg); highlight(svg, event.target); return; }
        if (plot.k === "line") now = readLine(svg, plot, data[plot.p], at(x, svg, plot, true), y);
        else readHeat(svg, plot, data[plot.p], x, y);
      }
      if (plots.length) {
        svg.addEventListener("pointermove", move);
        svg.addEventListener("pointerdown", move);
        svg.addEventListener("pointerleave", function () { clear(svg); now = null; });
      }
      if (plots.length === 1 && plots[0].k === "line") {  // the same by keyboard
        svg.setAttribute("tabindex", "0");
        svg.addEventListener("keydown", function (event) {
          if (event.key === "Escape") { clear(svg); return; }
          if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
          event.preventDefault();
          var places = [];
          data[0].s.forEach(function (one) { one.p.forEach(function (p) { if (places.indexOf(p[0]) < 0) places.push(p[0]); }); });
          places.sort(function (a, b) { return a - b; });
          var next = now === null ? places.length - 1 : places.indexOf(now) + (event.key === "ArrowLeft" ? -1 : 1);
          next = Math.max(0, Math.min(places.length - 1, next));
          now = readLine(svg, plots[0], data[0], places[next], plots[0].r[1]);
        });
        svg.addEventListener("blur", function () { clear(svg); now = null; });
      }
    });
  });
  function highlight(svg, target) {
    var series = target.closest ? target.closest("[data-s]") : null;
    if (!series) return;
    svg.classList.add("dim");
    [].forEach.call(svg.querySelectorAll("[data-s]"), function (one) {
      one.classList.toggle("on", one.dataset.s === series.dataset.s);
    });
  }

  // -- wide tables: their heads wrap only where the table would not fit otherwise; what still scrolls shows it
  function fit() {
    [].forEach.call(document.querySelectorAll(".scroll"), function (frame) {
      var next = frame.nextElementSibling, hint = next && next.classList.contains("hint") ? next : null;
      frame.classList.remove("tight");
      if (!frame.clientWidth) return;
      if (frame.scrollWidth > frame.clientWidth + 1) frame.classList.add("tight");
      if (frame.scrollWidth > frame.clientWidth + 1) frame.classList.remove("tight");
      var hidden = frame.scrollWidth - frame.clientWidth - frame.scrollLeft > 1;
      frame.classList.toggle("more", hidden);
      if (hidden && !hint) {
        hint = element("span", "scroll for more →", frame.parentNode);
        hint.className = "hint";
        hint.setAttribute("aria-hidden", "true");
        frame.parentNode.insertBefore(hint, frame.nextSibling);
        frame.addEventListener("scroll", fit, { passive: true });
      } else if (hint) hint.hidden = !hidden;
    });
  }
  fit();
  window.addEventListener("resize", fit);
  document.addEventListener("toggle", fit, true);

  // -- sortable tables
  [].forEach.call(document.querySelectorAll("table.sorts"), function (table) {
    var heads = table.tHead.rows[table.tHead.rows.length - 1].cells;
    [].forEach.call(heads, function (head, column) {
      var made = document.createElement("button");
      made.type = "button";
      while (head.firstChild) made.appendChild(head.firstChild);
      head.appendChild(made);
      made.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") !== "descending", body = table.tBodies[0];
        [].forEach.call(heads, function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        function key(row) { var cell = row.cells[column]; return cell.dataset.v === undefined ? cell.textContent.trim() : +cell.dataset.v; }
        [].slice.call(body.rows).sort(function (a, b) {
          var x = key(a), y = key(b), order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
          return down ? -order : order;
        }).forEach(function (row) { body.appendChild(row); });
      });
    });
  });
})();
