// Everything that needs no new data: the address, the theme, the pointer, the scale slider.
// Numbers and words come from the server in a figure's `meta`; this file only picks among them.
(function () {
  "use strict";

  const NO = () => window.dash_clientside.no_update;
  const DEFAULTS = { metric: "sqnr", sort: "worst", q: "" };
  const ZONES = 7;
  const NARROW = 700;
  const WIDE = 1240;
  const URL_DELAY_MS = 200;
  const INTEGER = /^-?\d{1,16}$/;

  // --- the address: every state of a page is in its query ---------------------------------------------------------

  let pendingScale; // power of two not yet written: browsers refuse too many history calls while the slider moves
  let scaleTimer = null;

  function query() {
    return new URLSearchParams(window.location.search);
  }

  function integer(text) {
    return INTEGER.test(text || "") ? Number(text) : null;
  }

  function write(changes, how) {
    const params = query();
    if (pendingScale !== undefined && !("k" in changes)) {
      changes = { ...changes, k: pendingScale };
    }
    pendingScale = undefined;
    window.clearTimeout(scaleTimer);
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === "" || value === DEFAULTS[key]) {
        params.delete(key);
      } else {
        params.set(key, value);
      }
    }
    const text = params.toString();
    const next = window.location.pathname + (text ? "?" + text : "");
    if (next === window.location.pathname + window.location.search) {
      return;
    }
    try {
      window.history[how === "push" ? "pushState" : "replaceState"]({}, "", next);
    } catch (error) {
      return; // too many calls in a row; the next one carries the state
    }
    if (how !== "silent") {
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate")); // dcc.Location listens to this
    }
  }

  function writeScaleSoon(k) {
    pendingScale = k;
    window.clearTimeout(scaleTimer);
    scaleTimer = window.setTimeout(() => write({}, "silent"), URL_DELAY_MS);
  }

  function same(a, b) {
    return JSON.stringify(a) === JSON.stringify(b);
  }

  function pin(changes) {
    write({ from: null, to: null, ...changes }, "push");
  }

  function triggered() {
    return window.dash_clientside.callback_context.triggered.map((item) => item.prop_id);
  }

  // --- what only the browser knows ---------------------------------------------------------------------------------

  const browser = { theme: null, width: null };

  function look() {
    const dark = document.documentElement.dataset.mantineColorScheme === "dark";
    const width = window.innerWidth < NARROW ? "narrow" : window.innerWidth < WIDE ? "medium" : "wide";
    return { theme: dark ? "dark" : "light", width: width };
  }

  function announce() {
    for (const [name, value] of Object.entries(look())) {
      if (browser[name] !== null && browser[name] !== value) {
        browser[name] = value;
        window.dash_clientside.set_props(name, { data: value });
      }
    }
  }

  window.addEventListener("resize", announce);
  new MutationObserver(announce).observe(document.documentElement, {
    attributes: true,
    attributeFilter: ["data-mantine-color-scheme"],
  });

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-pin]");
    if (button) {
      pin({ layer: button.dataset.pin });
      const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
      document.getElementById("layer").scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
    }
  });

  // --- pictures -----------------------------------------------------------------------------------------------------

  function outline(meta, pinned, shown) {
    const shapes = [];
    const row = meta ? meta.members.findIndex((names) => names.includes(shown)) : -1;
    if (row >= 0) {
      shapes.push({
        type: "rect", xref: "paper", x0: 0, x1: 1, yref: "y", y0: row - 0.5, y1: row + 0.5,
        line: { color: "#1f8fd6", width: 2 }, fillcolor: "rgba(0,0,0,0)",
      });
    }
    if (pinned && pinned.from !== null) {
      shapes.push({
        type: "line", xref: "x", x0: pinned.from, x1: pinned.from, yref: "paper", y0: 0, y1: 1,
        line: { color: "#1f8fd6", width: 1, dash: "dot" },
      });
    }
    return shapes;
  }

  // dcc.Graph writes a zoom into its figure, which to plotly is the page's own wish and ends uirevision's care for it
  function keepZoom(layout, shown) {
    for (const name of ["xaxis", "yaxis"]) {
      const axis = layout[name];
      const before = shown && shown.layout && shown.layout[name];
      if (axis && before && before.autorange === false && before.uirevision === axis.uirevision) {
        axis.autorange = false;
        axis.range = before.range;
      }
    }
    return layout;
  }

  function paintTimeline(data, theme, width, pinned, layer, shown) {
    if (!data || !width) {
      return [{ data: [], layout: {} }, { display: "none" }];
    }
    const meta = data.meta;
    const narrow = width === "narrow";
    const layout = keepZoom(structuredClone(data.figure.layout), shown);
    layout.shapes = outline(meta, pinned, layer ? layer.meta.name : null);
    if (narrow) {
      Object.assign(layout.margin, { l: meta ? 116 : 44, r: 8 });
      layout.dragmode = false; // a finger drags the page
      layout.xaxis.nticks = 4;
      if (meta) {
        Object.assign(layout.yaxis, { labelalias: meta.narrow, tickfont: { size: 11 } });
      }
    }
    const traces = data.figure.data.map((trace) =>
      trace.type === "heatmap" ? { ...trace, colorscale: meta.ramps[theme] } : trace
    );
    return [{ data: traces, layout: layout }, { display: "block", height: layout.height + "px" }];
  }

  // dcc.Graph hands over a cell's label and centre, not its row and column
  function cellOf(event, data) {
    const point = event && event.points && event.points[0];
    if (!point || !data || !data.meta || point.z === undefined) {
      return null;
    }
    const row = data.figure.data.find((trace) => trace.type === "heatmap").y.indexOf(point.y);
    const column = data.meta.edges.findIndex((edge) => edge > point.x) - 1;
    return row >= 0 && column >= 0 ? { point: point, row: row, column: column } : null;
  }

  function line(text, className) {
    return { namespace: "dash_html_components", type: "Div", props: { children: text, className: className } };
  }

  function tip(hover, data) {
    const cell = cellOf(hover, data);
    if (cell === null) {
      return [false, NO(), NO(), NO()];
    }
    const names = data.meta.members[cell.row];
    const more = names.length > 1 ? " and " + (names.length - 1) + " more, worst of them" : "";
    const words = [
      line(names[0] + more, "tip-name"),
      line(data.meta.levels[cell.point.z], "tip-value"),
      line(data.meta.columns[cell.column] + ", at scale " + data.meta.scales[data.meta.scaleOf[cell.column]], "tip-where"),
    ];
    const box = cell.point.bbox;
    const place = box.x1 / document.getElementById("timeline").clientWidth;
    return [true, box, words, place > 0.66 ? "left" : place < 0.34 ? "right" : "bottom"];
  }

  function bandOf(bands, exponent) {
    return bands.find((band) => band.below === null || exponent < band.below);
  }

  function bandShapes(meta, k, range) {
    let left = range[0];
    const shapes = [];
    for (const band of meta.bands) {
      const right = Math.min(band.below === null ? range[1] : band.below - k, range[1]);
      if (right > left) {
        shapes.push({
          type: "rect", xref: "x", x0: left, x1: right, yref: "paper", y0: 0, y1: 1, layer: "below",
          fillcolor: band.colour, opacity: band.zone === "normal" ? 0.05 : 0.14, line: { width: 0 },
        });
        left = right;
      }
    }
    return shapes;
  }

  function limitMarks(meta, k, range) {
    const shapes = [];
    const annotations = [];
    for (const limit of meta.limits) {
      const x = limit.log2 - k;
      if (x < range[0] || x > range[1]) {
        continue;
      }
      shapes.push({
        type: "line", xref: "x", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: limit.colour, width: 2 },
      });
      annotations.push({
        text: limit.text, x: x, xref: "x", y: 1, yref: "paper", yanchor: "bottom", showarrow: false,
        font: { size: 11 }, xanchor: "center",
      });
    }
    return { shapes: shapes, annotations: annotations };
  }

  function marksOf(meta) {
    const marks = [];
    for (let k = Math.ceil(meta.low / 8) * 8; k <= meta.high; k += 8) {
      marks.push({ value: k, label: "2^" + k });
    }
    return marks;
  }

  function chosenScale(meta, triggers, value) {
    if (triggers.includes("scale-back.n_clicks")) {
      pendingScale = undefined;
      write({ k: null }, "silent");
      return meta.start;
    }
    if (triggers.length === 1 && triggers[0] === "scale.value" && Number.isInteger(value)) {
      return value;
    }
    const asked = pendingScale !== undefined ? pendingScale : integer(query().get("k"));
    return asked === null ? meta.start : Math.min(Math.max(asked, meta.low), meta.high);
  }

  function paintHistogram(data, value, back, search, width, shown) {
    if (!data) {
      return [NO(), { display: "none" }].concat(Array(6 + 2 * ZONES).fill(NO()));
    }
    const meta = data.meta;
    const triggers = triggered();
    const moved = triggers.length === 1 && triggers[0] === "scale.value";
    const k = Math.min(Math.max(chosenScale(meta, triggers, value), meta.low), meta.high);
    if (moved) {
      writeScaleSoon(k);
    }
    const layout = keepZoom(structuredClone(data.figure.layout), shown);
    const range = meta.range;
    const limits = limitMarks(meta, k, range);
    layout.shapes = bandShapes(meta, k, range).concat(limits.shapes);
    layout.annotations = layout.annotations.concat(limits.annotations);
    if (width === "narrow") {
      limits.annotations.forEach((label, i) => (label.yshift = i % 2 ? 0 : 14)); // side by side they would overlap
      layout.dragmode = false;
      layout.xaxis.dtick *= 2;
    }
    const colours = meta.exponents.map((exponent) => bandOf(meta.bands, exponent + k).colour);
    const bars = { ...data.figure.data[0], marker: { color: colours } };
    const index = k - meta.low;
    const still = NO();
    return [
      { data: [bars], layout: layout },
      {},
      moved ? still : meta.low,
      moved ? still : meta.high,
      moved ? still : marksOf(meta),
      moved && k === value ? still : k,
      meta.scales[index],
      "At scale " + meta.scales[index] + ": " + meta.whole,
      ...meta.shares[index],
      ...meta.widths[index].map((width) => ({ width: width + "%", minWidth: width > 0 ? "2px" : "0" })),
    ];
  }

  // --- between address and controls ---------------------------------------------------------------------------------

  function readUrl(search, view, pinned) {
    const params = query();
    const nextView = {};
    for (const key of Object.keys(DEFAULTS)) {
      nextView[key] = params.get(key) || DEFAULTS[key];
    }
    const nextPin = { layer: params.get("layer"), from: integer(params.get("from")), to: integer(params.get("to")) };
    return [same(view, nextView) ? NO() : nextView, same(pinned, nextPin) ? NO() : nextPin];
  }

  function controls(view) {
    const params = query();
    const shown = view || DEFAULTS;
    return [shown.metric, shown.sort, params.get("q") || ""];
  }

  function writeUrl(metric, sort, q, layer, span, click, timeline, histogram) {
    const changed = triggered();
    const meta = histogram && histogram.meta;
    if (changed.includes("timeline.clickData")) {
      const cell = cellOf(click, timeline);
      if (cell !== null) {
        const [first, last] = timeline.meta.steps[cell.column];
        pin({ layer: timeline.meta.members[cell.row][0], from: first, to: last });
      }
    } else if (changed.includes("layer-select.value")) {
      if (layer && meta && layer !== meta.name) {
        pin({ layer: layer });
      }
    } else if (changed.includes("span.value")) {
      const one = query().has("from") || query().has("to");
      if (meta && span === "one" && !one) {
        pin({ layer: meta.name, from: meta.step, to: meta.step });
      } else if (meta && span === "all" && one) {
        pin({ layer: meta.name });
      }
    } else if (metric && sort) {
      write({ metric: metric, sort: sort, q: q }, "replace");
    }
    return NO();
  }

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.gradaudit = {
    browser: function () {
      Object.assign(browser, look());
      return [browser.theme, browser.width];
    },
    readUrl: readUrl,
    controls: controls,
    writeUrl: writeUrl,
    paintTimeline: paintTimeline,
    tip: tip,
    paintHistogram: paintHistogram,
  };
})();
