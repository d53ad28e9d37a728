// Shows the pictures of a run that its server sends. Text from peers is only ever set as text, never as markup.

const $ = (id) => document.getElementById(id);
const MOST_LINKS = 24;
const SVG = "http://www.w3.org/2000/svg";
const secret = location.hash.slice(1);
let picture = null;
let axis = "tokens";
let chart = null;

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---- figures --------------------------------------------------------------------------------------------------------

const known = (value) => typeof value === "number" && Number.isFinite(value);
const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "-");
const brief = (value) => (known(value) ? Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value) : "-");
const loss = (value) => (known(value) ? value.toFixed(4) : "-");
const short = (peer) => String(peer).slice(-6);
const text = (value, most = 160) => String(value ?? "").slice(0, most);
const stageOf = (module) => Number.parseInt(String(module).split(".")[0], 10);

function bytes(value) {
  if (!known(value)) return "-";
  const unit = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, size]) => value >= size) ?? ["B", 1];
  return `${(value / unit[1]).toFixed(unit[1] === 1 ? 0 : 1)} ${unit[0]}`;
}

function duration(seconds) {
  if (!known(seconds)) return "-";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function table(caption, headings, rows) {
  const numeric = headings.map((heading) => heading.startsWith("#"));
  const head = headings.map((heading, i) => made("th", { scope: "col", class: numeric[i] ? "number" : "" }, heading.replace(/^#|^why (?=now)/, "")));
  const cell = (value, i) => (value instanceof Node ? made("td", {}, value) : made("td", { class: numeric[i] ? "number" : headings[i].startsWith("why") ? "why" : "" }, value));
  const body = rows.map((row) => made("tr", {}, ...row.map(cell)));
  return made("table", {}, made("caption", { class: "hidden" }, caption), made("thead", {}, made("tr", {}, ...head)), made("tbody", {}, ...body));
}

const name = (peer) => made("span", { class: "name", title: text(peer, 80) }, short(peer));

// ---- parts of the page ----------------------------------------------------------------------------------------------

function showRun({ status, own }) {
  document.title = `${loss(status.loss)} ${text(status.name, 60)} - Skipstone`;
  $("name").textContent = text(status.name, 80);
  const whose = own.length ? "this node's view" : "a visitor's view";
  $("about").textContent = `run ${text(status.run, 12)}, ${count(status.stages)} stages, ${whose}`;
  const { completed, abandoned } = status.microbatches;
  const figures = {
    loss: loss(status.loss), step: count(status.step), tokens: brief(status.tokens), "tokens/s": brief(status.tokens_per_s),
    peers: count(status.peers.filter((peer) => peer.module !== null).length),
    microbatches: abandoned ? `${brief(completed)} (${brief(abandoned)} abandoned)` : brief(completed),
  };
  $("figures").replaceChildren(...Object.entries(figures).map(([term, value]) => made("div", {}, made("dt", {}, term), made("dd", {}, value))));
  const waiting = status.waiting_for.slice(0, 16).map((module) => text(module, 12));
  $("waiting").hidden = waiting.length === 0;
  $("waiting").textContent = waiting.length ? `Waiting: no peer serves ${waiting.join(", ")}.` : "";
}

function showCurve({ status: { curve } }) {
  if (!curve?.points.length) return;
  // A peer's clock may say anything, and no axis has room for all of it.
  const points = curve.points.filter((point) => point[3] < 2 ** 33);
  const column = (place) => points.map((point) => point[place]);
  const data = [column({ step: 0, tokens: 1, time: 3 }[axis]), column(2)];
  const losses = data[1].filter(known);
  $("curve").setAttribute("aria-label", losses.length ? `Loss from ${loss(losses[0])} to ${loss(losses.at(-1))} in ${count(curve.points.at(-1)[0])} steps` : "No loss yet");
  if (chart !== null && chart.axis === axis) {
    chart.plot.setData(data);
    return;
  }
  chart?.plot.destroy();
  const style = getComputedStyle(document.body);
  const [line, dim, grid] = ["--blue", "--dim", "--line"].map((each) => style.getPropertyValue(each).trim());
  const lines = { stroke: dim, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
  const options = {
    width: $("curve").clientWidth, height: 250, scales: { x: { time: axis === "time" } },
    axes: [{ ...lines, values: axis === "time" ? undefined : (_, values) => values.map(brief) }, { ...lines, size: 52 }],
    series: [{ label: axis }, { label: "loss", stroke: line, width: 2, points: { show: losses.length < 3 } }],
  };
  chart = { axis, plot: new uPlot(options, data, $("curve")) };
}

const sorted = (peers) => peers.toSorted((one, other) => stageOf(one.module) - stageOf(other.module) || (one.peer < other.peer ? -1 : 1));

// Modules of each stage, those that nobody serves included.
function stages(status) {
  const found = Array.from({ length: Math.min(status.stages, 256) }, () => new Map());
  const add = (module) => {
    const stage = found[stageOf(module)];
    if (stage && !stage.has(module)) stage.set(module, []);
    return stage?.get(module);
  };
  for (const peer of status.peers) if (peer.module !== null) add(peer.module)?.push(peer);
  for (const module of status.modules ?? []) add(module);
  return found;
}

function peerCard(peer, own) {
  const silent = peer.answered == null;
  const state = silent ? "silent" : ["joining", "serving", "draining"].includes(peer.state) ? peer.state : "other";
  const busy = Math.max(0, peer.slots - peer.free_slots);
  const said = peer.answered ?? {};
  const download = said.catching_up;
  const lines = [
    `${silent ? "no answer" : text(peer.state, 16)}${own.includes(peer.peer) ? ", this node" : ""}`,
    peer.tokens_per_s ? `${brief(peer.tokens_per_s)} tokens/s` : null,
    download ? `downloads: ${bytes(download.bytes)} of ${bytes(download.total_bytes)}` : peer.round ? `round ${count(peer.round)}` : null,
  ].filter((line) => line !== null);
  const card = made("div", { class: `peer ${state}${own.includes(peer.peer) ? " own" : ""}`, title: text(peer.peer, 80) }, made("b", {}, short(peer.peer)), ` ${lines.join(", ")}`);
  if (peer.slots > 0) card.append(made("meter", { min: 0, max: peer.slots, value: busy, "aria-label": `${busy} of ${peer.slots} slots busy`, title: `${busy} of ${peer.slots} slots busy` }));
  return card;
}

function showSwarm({ status, own, gone, unix_s }) {
  const columns = stages(status).map((modules, stage) => {
    const column = made("div", { class: "stage" }, made("h3", {}, stage === 0 ? "stage 0 (data)" : `stage ${stage}`));
    for (const [module, peers] of modules) {
      if (status.modules) column.append(made("h3", {}, text(module, 12)));
      column.append(...(peers.length ? peers.map((peer) => peerCard(peer, own)) : [made("div", { class: "peer none" }, "no peer")]));
    }
    if (modules.size === 0) column.append(made("div", { class: "peer none" }, "no peer"));
    for (const peer of gone.filter((each) => stageOf(each.module) === stage)) {
      column.append(made("div", { class: "peer gone" }, made("b", {}, short(peer.peer)), ` gone ${duration(unix_s - peer.unix_s)} ago`));
    }
    return column;
  });
  $("swarm").replaceChildren(...columns);
}

function showPaths({ status, own }) {
  const columns = stages(status).map((modules) => [...modules.values()].flat().slice(0, 12));
  const most = Math.max(1, ...columns.map((peers) => peers.length));
  const [width, height] = [Math.max(320, columns.length * 64), 40 + most * 34];
  const x = (stage) => ((stage + 0.5) * width) / columns.length;
  const places = new Map();
  columns.forEach((peers, stage) => peers.forEach((peer, row) => places.set(peer.peer, [x(stage), 34 + (row + 0.5) * ((height - 40) / peers.length)])));
  const view = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Paths of the last microbatches through the stages; dashed lines skip stages" });
  columns.forEach((_, stage) => view.append(drawn("text", { x: x(stage), y: 14, "text-anchor": "middle" }, `stage ${stage}`)));
  const last = [];
  for (const node of status.peers) for (const done of node.answered?.completed ?? []) last.push({ from: node.peer, ...done });
  for (const [number, { from, hops }] of last.slice(-24).entries()) {
    const stops = [[0, from], ...hops.map((hop) => [stageOf(hop), hop.split("@")[1]])].filter(([, peer]) => places.has(peer));
    for (let i = 1; i < stops.length; i++) {
      const [[before, a], [stage, b]] = [stops[i - 1], stops[i]];
      const [[x1, y1], [x2, y2]] = [places.get(a), places.get(b)];
      const bend = (x2 - x1) / 2;
      const skips = Math.abs(stage - before) > 1;
      view.append(drawn("path", { d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, class: skips ? "skips" : "", opacity: 0.12 + (0.5 * number) / 24 }));
    }
  }
  for (const [peer, [cx, cy]] of places) view.append(drawn("circle", { cx, cy, r: 6, class: own.includes(peer) ? "own" : "" }, drawn("title", {}, short(peer))));
  $("paths").replaceChildren(view);
  const rows = last.slice(-8).map(({ microbatch, from, hops, seconds }) => {
    const visited = new Set([0, ...hops.map(stageOf)]);
    const skipped = columns.map((_, stage) => stage).filter((stage) => !visited.has(stage));
    const way = [`0 ${short(from)}`, ...hops.slice(0, 64).map((hop) => `${text(hop.split("@")[0], 8)} ${short(hop)}`)].join(" → ");
    return [text(microbatch, 24), way, skipped.join(", ") || "none", duration(seconds)];
  });
  $("paths-text").replaceChildren(rows.length ? table("Paths of the last microbatches", ["microbatch", "path", "skipped stages", "#time"], rows) : made("p", { class: "dim" }, "No microbatch is completed yet."));
}

function showOwn({ status, own }) {
  const mine = status.peers.filter((peer) => own.includes(peer.peer) && peer.answered);
  $("own-section").hidden = mine.length === 0;
  $("events-section").classList.toggle("wide", mine.length === 0);
  const rows = mine.map((peer) => {
    const said = peer.answered;
    const spent = said.compute ?? {};
    const whole = spent.busy_s + spent.idle_work_s + spent.idle_s;
    const links = Object.values(said.traffic ?? {});
    const sum = (key) => links.reduce((total, link) => total + link[key], 0);
    return {
      module: text(peer.module, 12), state: text(peer.state, 16), "inner steps": count(said.steps), "microbatches added": count(said.accumulated),
      "credit": `${count(said.credited ?? 0)} tokens, signed by data nodes`,
      "tokens/s": brief(said.tokens_per_s), "device busy": whole > 0 ? `${Math.round((100 * (spent.busy_s + spent.idle_work_s)) / whole)} %` : "-",
      rounds: `${count(said.round)}, ${text(said.rounds, 80)}`, sent: bytes(sum("sent_bytes")), received: bytes(sum("received_bytes")),
      "reached by peers": `${text(said.reach?.step, 16)}${said.reach?.reason ? `: ${text(said.reach.reason)}` : ""}`,
    };
  });
  $("own").replaceChildren(...rows.map((row) => table("This node", ["", ""], Object.entries(row))));
}

// The person may be typing: only fields that nobody has touched follow the node.
const LIMITS = {
  upload: ["Upload", "Mbit/s"], download: ["Download", "Mbit/s"], month: ["A month", "GB"], temperature: ["Temperature", "°C"],
  power: ["Power", "W"], hours: ["Hours", "as mon-fri 22:00-07:00"], idle: ["Idle for", "minutes"], battery: ["On battery", ""], programs: ["Not beside", "as steam,obs"],
};

function showLimits({ limits }) {
  $("limits-section").hidden = !limits;
  if (!limits) return;
  const state = limits.share >= 1 ? "at full speed" : limits.share > 0 ? `at ${Math.round(100 * limits.share)} % of its speed: ${text(limits.reason)}` : `paused: ${text(limits.reason)}`;
  $("limits-state").textContent = `This node runs ${state}. ${limits.used_gb.toFixed(2)} GB moved this month.${known(limits.temperature) ? ` Its ${known(limits.power) ? "GPU" : "device"} has ${Math.round(limits.temperature)} °C${known(limits.power) ? ` and takes ${Math.round(limits.power)} W` : ""}.` : ""}`.replace("runs paused", "is paused");
  const form = $("limits");
  if (form.childElementCount === 0) {
    for (const [limit, [label, unit]] of Object.entries(LIMITS)) {
      const input = made("input", { name: limit, type: limit === "battery" ? "checkbox" : "text", autocomplete: "off", placeholder: "no limit" });
      if (!secret) input.disabled = true;
      input.addEventListener("input", () => { input.dataset.touched = "yes"; });
      form.append(made("label", {}, made("span", {}, `${label}${unit ? ` (${unit})` : ""}`), input));
    }
    const button = made("button", { type: "submit" }, "Set limits");
    if (!secret) button.disabled = true;
    form.append(button);
  }
  for (const input of form.querySelectorAll("input")) {
    if (input.dataset.touched) continue;
    const value = limits.limits[input.name];
    if (input.type === "checkbox") input.checked = value;
    else input.value = Array.isArray(value) ? value.join(",") : value || "";
  }
}

$("limits").addEventListener("submit", async (event) => {
  event.preventDefault();
  const changes = {};
  for (const input of $("limits").querySelectorAll("input")) {
    const value = input.value.trim();
    if (input.type === "checkbox") changes[input.name] = input.checked;
    else if (input.name === "hours") changes.hours = value;
    else if (input.name === "programs") changes.programs = value.split(",").map((each) => each.trim()).filter(Boolean);
    else changes[input.name] = value === "" ? null : Number(value);
  }
  const answer = await fetch("/limits", { method: "POST", headers: { "X-Skipstone-Secret": secret }, body: JSON.stringify(changes) });
  $("limits-said").textContent = answer.ok ? "set" : await answer.text();
  if (answer.ok) for (const input of $("limits").querySelectorAll("input")) delete input.dataset.touched;
});

function showChoices({ status }) {
  const rows = status.peers.flatMap((peer) => Object.entries(peer.answered?.paths?.stages ?? {}).slice(0, 64).map(([stage, price]) => (
    [name(peer.peer), text(stage, 8), count(price.launched), `${Math.round(100 * price.share)} %`, (price.ahead ?? 0).toFixed(1), `${(price.price_s ?? 0).toFixed(3)} s`])));
  $("choices").replaceChildren(rows.length ? table("Prices of stages", ["data node", "#stage", "#launched", "#wanted share", "#visits ahead", "#price"], rows.slice(0, 64)) : made("p", { class: "dim" }, "No data node has answered yet."));
  const routes = (status.routes ?? []).slice(0, 64).map((route) => [route.experts.map((expert, at) => `${at + 1}.${expert}`).join(" ") || "others", `${Math.round(100 * route.share)} %`, count(route.visits), count(route.rerouted), loss(route.loss)]);
  $("routes-section").hidden = routes.length === 0;
  $("routes").replaceChildren(table("Routes of the documents", ["route", "#share", "#completed", "#rerouted", "#loss"], routes));
}

function showRounds({ status }) {
  const rows = sorted(status.peers.filter((peer) => peer.answered && peer.module !== null)).slice(0, 64).map((peer) => {
    const last = peer.answered.last_round;
    const ago = last ? `${duration(last.seconds_ago)} ago` : "-";
    return [text(peer.module, 12), name(peer.peer), count(peer.round), last ? count(last.members) : "-", ago, text(last?.codec, 12) || "-", text(peer.answered.rounds, 120), text(last?.codec_reason)];
  });
  $("rounds").replaceChildren(rows.length ? table("Averaging rounds", ["module", "peer", "#round", "#members", "committed", "codec", "why now", "why"], rows) : made("p", { class: "dim" }, "No peer has answered yet."));
}

function showLinks({ status }) {
  const rows = [];
  const members = new Set(status.peers.map((peer) => peer.peer));
  for (const peer of status.peers) {
    for (const [to, link] of Object.entries(peer.answered?.traffic ?? {})) {
      if (!members.has(to)) continue; // visitors, such as this page
      const codecs = peer.answered.codecs?.links?.[to] ?? peer.answered.codecs?.links?.[short(to)] ?? {};
      const speed = codecs.bytes_per_s ? `${((8 * codecs.bytes_per_s) / 1e6).toFixed(1)} Mbit/s` : "-";
      const chosen = [codecs.activations?.codec, codecs.gradients?.codec].map((codec) => text(codec, 12) || "-").join(" / ");
      rows.push([link.sent_bytes, name(peer.peer), name(to), bytes(link.sent_bytes), bytes(link.received_bytes), `${(1000 * link.round_trip_s).toFixed(1)} ms`, speed, chosen, text(codecs.activations?.why ?? codecs.gradients?.why)]);
    }
  }
  rows.sort((one, other) => other[0] - one[0]);
  const shown = rows.slice(0, MOST_LINKS).map(([, ...cells]) => cells);
  if (rows.length > shown.length) shown.push([`and ${rows.length - shown.length} quieter ones`, "", "", "", "", "", "", ""]);
  $("links").replaceChildren(rows.length ? table("Links", ["from", "to", "#sent", "#received", "#round trip", "#speed", "codecs forward / backward", "why"], shown) : made("p", { class: "dim" }, "No link has carried anything yet."));
}

function showDevices({ status }) {
  const rows = sorted(status.peers.filter((peer) => peer.answered?.compute && peer.module !== null)).slice(0, 64).map((peer) => {
    const { compute, weights, moments } = peer.answered;
    const whole = compute.busy_s + compute.idle_work_s + compute.idle_s;
    const share = (part) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "-");
    const put_off = weights?.put_off ? `${count(weights.visits)} visits` : "none";
    const why = [weights?.reason, moments && moments.form !== "float32" ? `moments in ${moments.form}: ${moments.reason}` : null];
    return [text(peer.module, 12), name(peer.peer), share(compute.busy_s), share(compute.idle_work_s), share(compute.idle_s), weights ? put_off : "-", text(why.filter(Boolean).join("; "), 240)];
  });
  $("devices").replaceChildren(rows.length ? table("Compute devices", ["module", "peer", "#computing", "#deferred work", "#idle", "#weights deferred", "why"], rows) : made("p", { class: "dim" }, "No peer has answered yet."));
}

// A peer with several modules has a row for each: others cannot know that they are one machine.
function showCredit({ status, own }) {
  const credited = (peer) => Number(peer.answered?.credited ?? 0);
  const rows = status.peers.filter((peer) => credited(peer) > 0).toSorted((one, other) => credited(other) - credited(one)).slice(0, 16).map((peer, place) => (
    [count(place + 1), text(peer.answered.name, 32) || "-", made("span", {}, name(peer.peer), own.includes(peer.peer) ? " (this node)" : ""), text(peer.module, 12), count(credited(peer))]));
  $("credit").replaceChildren(rows.length ? table("Peers with most work", ["#", "name", "peer", "module", "#tokens"], rows) : made("p", { class: "dim" }, "No work is signed yet."));
}

function showEvents({ happened }) {
  const lines = happened.toReversed().map((each) => {
    const at = new Date(1000 * each.unix_s);
    return made("li", { class: each.level === "info" ? "" : each.level }, made("time", { datetime: at.toISOString() }, at.toLocaleTimeString()), text(each.text, 400));
  });
  $("events").replaceChildren(...(lines.length ? lines : [made("li", { class: "dim" }, "Nothing yet.")]));
}

// ---- text that the model continues -----------------------------------------------------------------------------------

$("sample-section").hidden = !secret;
$("sample").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = $("sample").querySelector("button");
  button.disabled = true;
  $("sampled").textContent = "reading the model";
  try {
    const answer = await fetch("/sample", { method: "POST", headers: { "X-Skipstone-Secret": secret }, body: $("prompt").value });
    $("sampled").textContent = await answer.text();
  } catch {
    $("sampled").textContent = "the node does not answer";
  }
  button.disabled = false;
});

// ---- verbs ----------------------------------------------------------------------------------------------------------

const VERBS = { pause: ["Pause", null], resume: ["Resume", null], leave: ["Leave the run", "Stop this node? It finishes its work and leaves."], stop: ["Stop the swarm", "Stop all nodes of this swarm?"] };

function showVerbs({ verbs }) {
  if (!secret || $("verbs").childElementCount === verbs.length) return;
  const buttons = verbs.map((verb) => {
    const [label, question] = VERBS[verb] ?? [verb, null];
    const button = made("button", { type: "button" }, label);
    button.addEventListener("click", async () => {
      if (question !== null && !confirm(question)) return;
      const answer = await fetch(`/ask/${verb}`, { method: "POST", headers: { "X-Skipstone-Secret": secret } });
      $("pulse").textContent = answer.ok ? `${label}: asked` : await answer.text();
    });
    return button;
  });
  $("verbs").replaceChildren(...buttons);
}

// ---- main -----------------------------------------------------------------------------------------------------------

const PARTS = [showRun, showCurve, showSwarm, showPaths, showOwn, showLimits, showChoices, showRounds, showLinks, showDevices, showCredit, showEvents, showVerbs];

function show() {
  if (picture !== null) for (const part of PARTS) part(picture);
}

for (const each of ["tokens", "time", "step"]) {
  const button = made("button", { type: "button", "aria-pressed": each === axis }, each);
  button.addEventListener("click", () => {
    axis = each;
    for (const other of $("axes").children) other.setAttribute("aria-pressed", other === button);
    if (picture !== null) showCurve(picture);
  });
  $("axes").append(button);
}

function redraw() {
  chart?.plot.destroy();
  chart = null;
  if (picture !== null) showCurve(picture);
}
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

const stream = new EventSource("/pictures");
stream.addEventListener("message", ({ data }) => {
  const sent = JSON.parse(data);
  if (sent.unreachable) {
    $("pulse").textContent = `trying again: ${text(sent.unreachable, 300)}`;
    return;
  }
  picture = sent;
  $("pulse").textContent = `live, ${new Date(1000 * picture.unix_s).toLocaleTimeString()}`;
  show();
});
stream.addEventListener("error", () => {
  $("pulse").textContent = "the node does not answer; trying again";
});
