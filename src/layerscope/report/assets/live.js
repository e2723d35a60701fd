// A served page follows its server: when it is told of something new, it fetches itself and takes the new parts in.
// The answer is parsed as an inert document; its nodes are adopted, and no text of it becomes markup here.
(() => {
  if (location.search.includes("token=")) history.replaceState(null, "", location.pathname + location.hash);
  const path = document.body.dataset.events;
  const told = document.createElement("p");
  told.className = "quiet live";
  told.setAttribute("role", "status");
  document.querySelector("main").before(told);
  if (location.pathname !== "/") {
    const home = document.createElement("a");
    home.href = "/";
    home.textContent = "all runs";
    const line = document.createElement("nav");
    line.append(home);
    told.before(line);
  }
  const tell = (text) => { told.textContent = text; };

  const chosen = [];
  const pick = () => {
    const links = [...document.querySelectorAll('td a[href^="/run/"]')];
    if (!links.length) return;
    const bar = document.createElement("p");
    bar.className = "tools";
    const say = document.createElement("span");
    const go = document.createElement("button");
    go.type = "button";
    go.textContent = "compare";
    const show = () => {
      const names = chosen.map((id) => (links.find((a) => a.pathname === `/run/${id}`) || {}).textContent || id);
      say.textContent = names.length ? `reference: ${names[0]}${names.length > 1 ? `; against: ${names.slice(1).join(", ")}` : "; choose what to compare with it"}` : "choose two runs or more to compare; the first is the reference";
      go.disabled = names.length < 2;
    };
    links.forEach((link) => {
      const id = link.pathname.slice(5);
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = chosen.includes(id);
      box.setAttribute("aria-label", `compare ${link.textContent}`);
      box.addEventListener("change", () => {
        if (box.checked) chosen.push(id); else chosen.splice(chosen.indexOf(id), 1);
        show();
      });
      link.before(box, " ");
    });
    go.addEventListener("click", async () => {
      go.disabled = true;
      const answer = await fetch("/compare", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ runs: chosen }) });
      const said = await answer.json();
      if (answer.ok) location.assign(said.page); else { say.textContent = said.error; go.disabled = false; }
    });
    bar.append(say, " ", go);
    const table = links[0].closest(".table");
    table.before(bar);
    show();
  };

  const keep = () => ({
    folds: [...document.querySelectorAll("details[open]")].map((fold) => fold.id || fold.querySelector("summary").textContent),
    radios: [...document.querySelectorAll("input[type=radio]:checked")].map((radio) => radio.id),
    searches: [...document.querySelectorAll("input[type=search]")].map((search) => search.value),
    y: scrollY,
  });
  const restore = (kept) => {
    document.querySelectorAll("details").forEach((fold) => {
      if (kept.folds.includes(fold.id || fold.querySelector("summary").textContent)) fold.open = true;
    });
    kept.radios.forEach((id) => { const radio = document.getElementById(id); if (radio) radio.checked = true; });
    document.querySelectorAll("input[type=search]").forEach((search, at) => {
      if (kept.searches[at]) { search.value = kept.searches[at]; search.dispatchEvent(new Event("input")); }
    });
    scrollTo(0, kept.y);
  };

  let busy = false, again = false, seen = document.body.dataset.seen;
  const refresh = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch(location.pathname);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const main = page.querySelector("main"), island = page.getElementById("data");
      if (answer.ok && main && island) {
        const kept = keep();
        document.querySelector("main").replaceWith(document.adoptNode(main));
        document.getElementById("data").replaceWith(document.adoptNode(island));
        layerscope.start(document.getElementById("data"), document);
        pick();
        restore(kept);
        seen = page.body.dataset.seen;
        document.body.dataset.refreshed = String(Number(document.body.dataset.refreshed || 0) + 1);
      } else tell("this page is no longer there");
    } catch (error) {
      tell("the server does not answer; this is what it said last");
    }
    busy = false;
    if (again) { again = false; refresh(); }
  };

  pick();
  const events = new EventSource(path);
  events.addEventListener("message", (event) => {
    tell("");
    if (event.data !== seen) refresh();
  });
  events.addEventListener("error", () => tell("the server does not answer; this is what it said last"));
})();
