"use strict";
// What a person expects of a page that is whole without this: values under the pointer, sort, filter, collapse, addresses.
// Text goes in by textContent alone; nothing is fetched.
const layerscope = (() => {
  const MARGIN = 20;
  const OPEN = 24; // a tree of more rows, some of them bad, begins with what is in order closed
  const TALL = 60; // one with nothing bad begins with as many levels as so many rows have room for
  let data = { figures: [], tables: [] };
  const make = (tag, text, ...classes) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    node.classList.add(...classes.filter(Boolean));
    return node;
  };
  const SIGNS = { good: "\u2713 ", warn: "\u26a0 ", bad: "\u2717 " };

  // Tables: each row is what it shows, what it sorts by, and its element, which a long table makes when it is looked at.
  const sorted = (text, value) => {
    if (value !== null && value !== undefined) return Number(value);
    const plain = text.replace(/^[\u2713\u26a0\u2717] /, "");
    const number = Number(plain.replace(/,/g, "").replace(/%$| dB$/, ""));
    return plain !== "" && !Number.isNaN(number) ? number : plain;
  };
  const readRow = (tr) => ({
    tr,
    opens: tr.dataset.opens || "",
    depth: tr.dataset.depth === undefined ? null : Number(tr.dataset.depth),
    keys: [...tr.cells].map((td) => sorted(td.textContent.trim(), td.dataset.v)),
    text: tr.textContent.toLowerCase(),
  });
  const slimRow = ([cells, opens, depth], heads) => {
    const full = cells.map((cell) => (Array.isArray(cell) ? cell : [cell]));
    return {
      tr: null, opens, depth, full, heads,
      keys: full.map(([text, value]) => sorted(text, value)),
      text: full.map(([text]) => text).join(" ").toLowerCase(),
    };
  };
  const hang = (row) => { // between what sets a name in and the name
    const cell = row.tr.cells[0], at = cell.firstChild.textContent.search(/[^\u2003]/);
    cell.insertBefore(row.twig, at > 0 && cell.firstChild.nodeType === Node.TEXT_NODE ? cell.firstChild.splitText(at) : at ? cell.firstChild.nextSibling : cell.firstChild);
  };
  const troubled = (row) => (row.tr ? Boolean(row.tr.querySelector(".bad")) : row.full.some((cell) => cell[2] === "bad"));
  const element = (row) => {
    if (row.tr) return row.tr;
    row.tr = make("tr");
    if (row.opens) row.tr.dataset.opens = row.opens;
    row.full.forEach(([text, value, tone, length], at) => {
      const td = make("td", undefined, row.heads[at].classList.contains("right") ? "right" : "", tone);
      if (value !== null && value !== undefined) td.dataset.v = value;
      if (length) {
        const bar = document.createElementNS("http://www.w3.org/2000/svg", "svg");
        const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        bar.classList.add("bar");
        bar.setAttribute("aria-hidden", "true");
        bar.setAttribute("viewBox", "0 0 100 10");
        bar.setAttribute("preserveAspectRatio", "none");
        rect.setAttribute("width", length * 100);
        rect.setAttribute("height", 10);
        bar.append(rect);
        td.append(bar);
      } else if (at === 0 && row.opens) {
        const link = make("a", text);
        link.href = `#row-${row.opens}`;
        td.append(link);
      } else if (at === 0 && row.depth === null) td.append(make("bdi", text)); // shortened at its beginning on a telephone
      else if (at) td.textContent = SIGNS[tone] && text ? SIGNS[tone] + text : text;
      else td.textContent = "\u2003\u2003".repeat(row.depth || 0) + text;
      row.tr.append(td);
    });
    if (row.twig) hang(row);
    return row.tr;
  };

  function table(box) {
    const grid = box.querySelector("table"), body = grid.tBodies[0], heads = [...grid.tHead.rows[0].cells];
    const given = grid.dataset.table === undefined ? null : data.tables[grid.dataset.table];
    const rows = given ? given.map((row) => slimRow(row, heads)) : [...body.rows].map(readRow);
    const tree = grid.classList.contains("tree");
    let shown = rows, by = null, down = false, asked = "", closed = new Set();
    const count = make("span");
    count.setAttribute("role", "status");

    let drawn = [0, 0];
    const draw = (anew) => {
      if (!given) return body.replaceChildren(...shown.map(element));
      const height = box.dataset.height ? Number(box.dataset.height) : 28;
      const top = Math.floor(box.scrollTop / height);
      const bottom = Math.min(shown.length, top + Math.ceil(box.clientHeight / height));
      if (!anew && top >= drawn[0] && bottom <= drawn[1]) return;
      const from = Math.max(0, top - MARGIN), to = Math.min(shown.length, bottom + MARGIN);
      drawn = [from, to];
      const space = (n) => {
        const tr = make("tr");
        const td = make("td");
        td.colSpan = heads.length;
        td.style.height = `${n * height}px`;
        td.style.padding = td.style.border = "0";
        tr.setAttribute("aria-hidden", "true");
        tr.append(td);
        return tr;
      };
      const some = shown.slice(from, to).map((row, at) => {
        const tr = element(row);
        tr.setAttribute("aria-rowindex", from + at + 2);
        return tr;
      });
      body.replaceChildren(space(from), ...some, space(shown.length - to));
    };
    const choose = () => {
      shown = rows.filter((row) => row.text.includes(asked));
      if (by !== null) {
        const kinds = shown.map((row) => [row.keys[by], row]);
        const low = (key) => (typeof key === "number" ? (Number.isNaN(key) ? 2 : 0) : key === "-" || key === "" ? 3 : 1);
        kinds.sort(([a], [b]) => {
          if (low(a) !== low(b)) return low(a) - low(b); // what has no number comes last, whichever way
          const order = typeof a === "number" ? a - b : String(a).localeCompare(b, undefined, { numeric: true });
          return down ? -order : order;
        });
        shown = kinds.map(([, row]) => row);
      }
      if (tree && !asked) {
        let hide = Infinity;
        shown = shown.filter((row) => {
          if (row.depth > hide) return false;
          hide = closed.has(row) ? row.depth : Infinity;
          return true;
        });
      }
      const all = `${rows.length.toLocaleString("en")} rows`;
      count.textContent = shown.length < rows.length ? `${shown.length.toLocaleString("en")} of ${all}` : all;
      box.scrollTop = 0;
      draw(true);
    };

    if (!tree && rows.length > 2) {
      heads.forEach((head, at) => {
        if (!head.textContent) return; // bars: the number beside them sorts
        const button = make("button", head.textContent);
        button.type = "button";
        head.replaceChildren(button);
        button.addEventListener("click", () => {
          down = by === at ? !down : typeof rows[0].keys[at] === "number";
          by = at;
          heads.forEach((other) => other.removeAttribute("aria-sort"));
          head.setAttribute("aria-sort", down ? "descending" : "ascending");
          choose();
        });
      });
    }
    if (rows.length > 8) {
      const tools = make("div", undefined, "tools"), search = make("input");
      search.type = "search";
      search.placeholder = "filter rows";
      search.setAttribute("aria-label", "filter the rows of this table");
      search.addEventListener("input", () => { asked = search.value.toLowerCase(); choose(); });
      tools.append(search, count);
      box.before(tools);
      count.textContent = `${rows.length.toLocaleString("en")} rows`;
    }
    if (tree) {
      const sick = rows.length > OPEN && rows.some(troubled);
      let level = 0;
      while (!sick && level < 100 && rows.filter((row) => row.depth <= level).length <= TALL) level += 1;
      rows.forEach((row, at) => {
        if (row.depth === null || !(rows[at + 1] && rows[at + 1].depth > row.depth)) return;
        const twig = make("button", "\u25be", "twig");
        twig.type = "button";
        twig.setAttribute("aria-expanded", "true");
        twig.setAttribute("aria-label", `what is inside ${row.tr ? row.tr.cells[0].textContent.trim() : row.full[0][0]}`);
        row.twig = twig;
        const fold = () => {
          closed.has(row) ? closed.delete(row) : closed.add(row);
          twig.textContent = closed.has(row) ? "\u25b8" : "\u25be";
          twig.setAttribute("aria-expanded", String(!closed.has(row)));
        };
        twig.addEventListener("click", () => {
          fold();
          const at = box.scrollTop;
          choose();
          box.scrollTop = at;
          draw(true);
          twig.focus();
        });
        if (row.tr) hang(row);
        if (sick ? !troubled(row) : row.depth >= Math.max(1, level - 1)) fold();
      });
      if (closed.size) choose();
    }
    if (given) {
      box.classList.add("window");
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", "table, scrolls");
      grid.setAttribute("aria-rowcount", rows.length + 1);
      const rest = box.nextElementSibling;
      if (rest && rest.classList.contains("rest")) rest.remove();
      heads.forEach((head, at) => { // a column keeps its width while rows come and go
        const longest = rows.reduce((most, row) => Math.max(most, row.full[at][0].length), 0);
        head.style.minWidth = `${Math.min(60, longest) * 7.5 + 14}px`;
      });
      choose();
      const first = body.rows[1];
      if (first) box.dataset.height = first.getBoundingClientRect().height || 28;
      addEventListener("beforeprint", () => body.replaceChildren(...shown.map(element)));
      addEventListener("afterprint", () => draw(true));
      let due = false;
      box.addEventListener("scroll", () => {
        if (due) return;
        due = true;
        requestAnimationFrame(() => { due = false; draw(); });
      }, { passive: true });
    }
  }

  // What lies under the pointer, or under the cursor that the arrow keys move.
  const tip = () => document.getElementById("tip");
  const say = (text, x, y) => {
    const box = tip();
    if (!box) return;
    box.textContent = text;
    box.hidden = false;
    const wide = box.offsetWidth, high = box.offsetHeight;
    box.style.left = `${Math.max(4, Math.min(innerWidth - wide - 4, x + 14))}px`;
    box.style.top = `${y + high + 24 > innerHeight ? y - high - 12 : y + 16}px`;
  };
  const written = (value) => (value === null ? "not measured" : String(value));
  function plot(svg) {
    const figure = data.figures[svg.dataset.figure];
    if (!figure) return;
    if (figure.edges) figure.labels = figure.edges.slice(1).map((edge, at) => `${figure.edges[at]} to ${edge}`);
    const across = (figure.columns || figure.labels).length, down = figure.rows ? figure.rows.length : 1;
    const cells = Boolean(figure.rows || figure.edges);
    let at = [0, 0];
    const show = (column, row, x, y) => {
      at = [column, row];
      say(figure.rows
        ? `${figure.rows[row]}\n${figure.columns[column]}: ${written(figure.values[row][column])}`
        : `${figure.labels[column]}\n${figure.lines.map(([name, values]) => `${name}: ${written(values[column])}`).join("\n")}`, x, y);
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
      const column = cells ? Math.floor(x * across) : Math.round(x * (across - 1));
      show(Math.max(0, Math.min(across - 1, column)), Math.max(0, Math.min(down - 1, Math.floor(y * down))), event.clientX, event.clientY);
    });
    const hide = () => { if (tip()) tip().hidden = true; };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-across, 0], End: [across, 0] }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      const column = Math.max(0, Math.min(across - 1, at[0] + step[0])), row = Math.max(0, Math.min(down - 1, at[1] + step[1]));
      const box = svg.getBoundingClientRect();
      const x = cells ? (column + 0.5) / across : across > 1 ? column / (across - 1) : 0.5;
      show(column, row, box.left + x * box.width, box.top + ((row + 0.5) / down) * box.height);
    });
  }

  // The address of a view: #row=KEY opens what tells more of a row.
  const open = (key) => {
    const fold = document.getElementById(`row-${key}`);
    if (!fold) return;
    for (let node = fold; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    fold.scrollIntoView({ block: "start" });
    fold.querySelector("summary").focus({ preventScroll: true });
  };
  const follow = () => {
    const found = /^#row[=-](.+)$/.exec(location.hash);
    if (found) open(decodeURIComponent(found[1]));
  };
  addEventListener("hashchange", follow);
  addEventListener("click", (event) => {
    const row = event.target.closest && event.target.closest("tr[data-opens]");
    if (!row || event.target.closest("button") || String(getSelection())) return;
    event.preventDefault();
    const address = `#row=${encodeURIComponent(row.dataset.opens)}`;
    location.hash === address ? follow() : (location.hash = address);
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  });

  const start = (island, root) => {
    data = JSON.parse(island.textContent);
    root.querySelectorAll(".table").forEach(table);
    root.querySelectorAll("svg[data-figure]").forEach(plot);
  };
  const island = document.getElementById("data");
  if (island) start(island, document);
  follow();
  return { start, follow };
})();
