// The page of an agent or a launcher. It only reads: each text is put in as text, never as markup. In a report the
// answers are in the file, and nothing is asked.
"use strict";

const RETRY = 2000; // milliseconds until a refused stream is opened again
const COLUMNS = 120; // samples of the heat map
const MOST_ROWS = 256; // of the heat map; more ranks share rows, of which the slowest counts
const MOST_CAUSES = 8;
const MOST_RANKS = 32; // in the table; of more, the remarkable ones
const INCIDENT_KINDS = "verdict,decision,outcome,finding";

const at = (id) => document.getElementById(id);
const inlined = at("answers") && JSON.parse(at("answers").textContent);

async function get(path) {
  if (inlined) {
    const name = decodeURIComponent(path);
    if (!(name in inlined)) throw new Error(`the report does not have ${name}`);
    return inlined[name];
  }
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(value.error || `${path}: status ${answer.status}`);
  return value;
}

function el(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

// Replaces what is shown only if it differs, so that focus and selections stay.
function show(parent, ...children) {
  const next = el("div", {}, ...children);
  if (parent.dataset.shown === next.innerHTML) return;
  const focused = document.activeElement && parent.contains(document.activeElement) && document.activeElement.id;
  parent.dataset.shown = next.innerHTML;
  parent.replaceChildren(...next.childNodes);
  if (focused && at(focused)) at(focused).focus();
}

function table(caption, columns, rows) {
  const cell = (name) => (value, column) =>
    el(name, { class: columns[column].number ? "number" : undefined, scope: name === "th" ? "col" : undefined }, value);
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...columns.map((column) => column.name).map(cell("th")))),
      el("tbody", {}, ...rows.map((row) => el("tr", { class: row.class }, ...row.cells.map(cell("td")))))));
}

const word = (name) => ({ name });
const number = (name) => ({ name, number: true });
const or = (value, text) => (value === undefined || value === null ? "-" : text === undefined ? String(value) : text);

const TONES = { HEALTHY: "good", DEGRADED: "warning", UNHEALTHY: "bad", RUNNING: "good", RECOVERING: "warning",
  STOPPING: "warning", LOST: "bad", UNKNOWN: "quiet" };
const badge = (state) => el("span", { class: TONES[state] }, state);

function spoken(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}
const since = (time, now) => (time && now ? spoken((Date.parse(now) - Date.parse(time)) / 1000) : undefined);
const clock = (time) => (time ? new Date(time).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }) : "-");
const percent = (share) => `${(share * 100).toFixed(0)} %`;
const isOver = (job) => job.phase === "ENDED" || job.phase === "LOST";

function showNode({ node, server }) {
  const isAgent = server.mode === "AGENT";
  document.title = `${server.hostname} - Mainstay`;
  at("host").textContent = server.hostname;
  at("program").textContent =
    `${(server.mode || "").toLowerCase()} ${server.version}, up ${or(since(server.start_time, server.time))}`;
  at("node").hidden = !isAgent && node.components.length === 0;
  show(at("node-reason"), badge(node.state), node.reason ? `: ${node.reason}` : "");
  const order = ["UNHEALTHY", "DEGRADED", "UNKNOWN", "HEALTHY"];
  const components = [...node.components].sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state));
  const rows = components.map((of) => ({ cells: [of.name, badge(of.state), of.reason,
    of.state === "HEALTHY" ? "" : or(since(of.since, server.time)),
    of.recommended_action === "NONE" ? "" : of.recommended_action] }));
  show(at("components"), table("Components", [word("Component"), word("State"), word("Reason"), word("For"),
    word("Recommended")], rows));
}

function showDevices({ devices }) {
  const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);
  const rows = devices.map((of) => ({ cells: [or(of.index), of.pci_address, badge(of.state), of.model,
    or(of.temperature, `${of.temperature} °C`), or(of.utilization, `${of.utilization} %`),
    or(of.memory_used, `${gib(of.memory_used)} / ${gib(of.memory_total || 0)} GiB`), of.reason || ""] }));
  const columns = [number("GPU"), word("PCI address"), word("State"), word("Model"), number("Temperature"),
    number("Busy"), number("Memory"), word("Reason")];
  show(at("devices"), ...(rows.length ? [table("Devices", columns, rows)] : []));
}

let selected = decodeURIComponent(location.hash.slice(1)) || undefined;
let wanted = []; // jobs of the last answer

function select(id) {
  selected = id;
  history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  for (const part of ["incidents", "ranks"]) {
    at(part).replaceChildren();
    delete at(part).dataset.shown;
    delete at(part).dataset.key;
  }
  follow();
}

function showJobs({ jobs }, now) {
  wanted = [...jobs].sort((a, b) => isOver(a) - isOver(b) || Date.parse(b.start_time) - Date.parse(a.start_time));
  if (!wanted.some((job) => job.id === selected)) selected = wanted.length ? wanted[0].id : undefined;
  const rows = wanted.map((job, place) => ({
    class: job.id === selected ? "selected" : undefined,
    cells: [
      el("button", { id: `job-${place}`, type: "button", "data-job": job.id,
        "aria-pressed": String(job.id === selected) }, job.id),
      el("span", { class: job.phase === "ENDED" ? (job.exit_status ? "bad" : "good") : TONES[job.phase] },
        job.phase === "ENDED" ? `ENDED (${or(job.exit_status)})` : job.phase),
      or(job.step, job.total_steps ? `${job.step} of ${job.total_steps}` : job.step), or(job.steps_per_second, (job.steps_per_second || 0).toFixed(2)), job.world_size,
      `${job.restarts} of ${job.max_restarts}`,
      job.copied_step ? or(since(job.copied_step.time, now)) : "-",
      isOver(job) ? "-" : or(since(job.start_time, now)),
      job.remaining === undefined ? "-" : spoken(job.remaining),
    ],
  }));
  const columns = [word("Job"), word("Phase"), number("Step"), number("Steps/s"), number("Ranks"),
    number("Restarts"), number("Age of copies"), number("Runs for"), number("Left")];
  show(at("jobs"), rows.length ? table("Select a job to see its incidents and ranks.", columns, rows)
    : el("p", { class: "quiet" }, "no jobs"));
}

at("jobs").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-job]");
  if (button) select(button.dataset.job);
});

function showJob(job, now) {
  at("job").hidden = false;
  at("job-title").textContent = `Job ${job.id}`;
  const alarms = [job.hang && job.hang.headline, ...job.findings.map((of) => of.headline), job.copies_behind, job.incomplete];
  const alarm = isOver(job) ? "" : alarms.filter(Boolean).join("; ");
  at("job-alarm").textContent = alarm;
  at("job-alarm").className = alarm ? "bad" : "";
  const verdict = job.last_verdict;
  const facts = [
    ["Command", job.texts_withheld ? `withheld: for user ${job.uid} and operators` : job.command.join(" ")],
    ["Started", clock(job.start_time)],
    ["Ended", job.end_reason],
    ["Last failure", verdict && `${verdict.headline} (${percent(verdict.confidence)} sure; ${verdict.domain})`],
    ["Decision", job.last_decision && `${job.last_decision.action}: ${job.last_decision.why}`],
    ["Run directory", job.run_dir],
  ].filter(([, value]) => value);
  show(at("facts"), ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  showGoodput(job.goodput || (job.books && goodputOf(job.books)));
  showCauses(job.books);
  showTiers(job, now);
  showRanks(job);
}

// The same of the books of a job that runs.
function goodputOf(books) {
  const parts = {};
  for (const { state, time } of books.times) parts[state] = (parts[state] || 0) + time;
  const wall = Object.values(parts).reduce((sum, of) => sum + of, 0);
  const lost = books.causes.reduce((sum, of) => sum + of.lost_steps, 0);
  return { wall_s: wall, parts, steps: books.steps, steps_lost: lost,
    goodput: books.measured && wall ? (parts.training || 0) / wall : undefined };
}

// What lost time is charged to, the most expensive first.
function showCauses(books) {
  const causes = books ? books.causes.map((of) => ({ of, lost: 0 })) : [];
  for (const { cause, time } of books ? books.times : []) {
    if (cause !== undefined) causes[cause].lost += time;
  }
  const rows = causes.filter(({ lost }) => lost > 0).sort((a, b) => b.lost - a.lost).slice(0, MOST_CAUSES)
    .map(({ of, lost }) => ({ cells: [of.headline || of.kind, of.host || "-", of.lost_steps, spoken(lost)] }));
  show(at("causes"), ...(rows.length ? [table("What lost time is charged to", [word("Cause"), word("Host"),
    number("Steps done twice"), number("Time")], rows)] : []));
}

// The time of the job by what it was spent on; seconds by category.
function showGoodput(goodput) {
  at("goodput").hidden = !goodput;
  if (!goodput) return;
  const parts = Object.entries(goodput.parts).sort((a, b) => b[1] - a[1]);
  const bars = parts.map(([name, seconds]) => {
    const share = goodput.wall_s ? seconds / goodput.wall_s : 0;
    const label = name.replaceAll("_", " ");
    return el("div", { class: "bar" }, el("span", {}, label),
      el("meter", { min: 0, max: 1, value: share, "aria-label": label }),
      el("span", {}, `${(share * 100).toFixed(1)} %, ${spoken(seconds)}`));
  });
  const goodputLine = goodput.goodput === undefined ? "goodput unknown: no rank sent heartbeats"
    : `goodput ${(goodput.goodput * 100).toFixed(1)} %`;
  show(at("bars"), el("p", {}, `${goodputLine}; ${goodput.steps} steps, ${goodput.steps_lost} done twice`), ...bars);
}

function showTiers(job, now) {
  const saving = job.saving;
  at("tiers").hidden = !(saving || job.copied_step);
  if (at("tiers").hidden) return;
  const parts = [];
  if (job.copied_step) {
    parts.push(el("p", {}, `step ${job.copied_step.step} is on two hosts (${or(since(job.copied_step.time, now))} ago)`));
  }
  if (saving) {
    parts.push(el("p", {}, `a save every ${saving.every_s.toFixed(0)} s costs least (${(saving.cost * 100).toFixed(2)} % of ` +
      `all time); as it is, every ${saving.was_s.toFixed(0)} s, ${(saving.cost_was * 100).toFixed(2)} %`));
    if (saving.tiers.length) {
      parts.push(table("Tiers", [word("Tier"), number("Advised interval")],
        saving.tiers.map((tier) => ({ cells: [tier.tier, `${tier.every_s.toFixed(0)} s`] }))));
    }
  }
  show(at("tiers-table"), ...parts);
}

// How late a rank is: its own time per step over that of its peers, else the steps that it is behind.
function lateness(rank, usual) {
  if (rank.against_peers !== undefined) return Math.max(0, rank.against_peers - 1) / 0.3;
  if (rank.step === undefined || usual === undefined) return undefined;
  return Math.max(0, usual - rank.step) / 4;
}

const samples = { job: undefined, columns: [] };

function showRanks(job) {
  at("ranks-part").hidden = job.ranks.length === 0;
  if (job.ranks.length === 0) return;
  const steps = job.ranks.map((rank) => rank.step).filter((step) => step !== undefined).sort((a, b) => a - b);
  const usual = steps[Math.floor(steps.length / 2)];
  const late = job.ranks.map((rank) => lateness(rank, usual));
  const key = `${job.id} ${job.attempt} ${job.ranks.length}`;
  if (samples.job !== key) Object.assign(samples, { job: key, columns: [] });
  samples.columns.push(late);
  if (samples.columns.length > COLUMNS) samples.columns.shift();
  at("map-part").hidden = inlined !== null || late.every((of) => of === undefined);
  if (!at("map-part").hidden) drawMap(job.ranks);

  const culprits = (job.hang && job.hang.culprits) || [];
  const named = new Set([...culprits, ...job.findings.flatMap((finding) => finding.ranks)]);
  const weight = (rank, place) => (named.has(rank.rank) ? 4 : 0) + (rank.phase === "CONNECTED" ? 0 : 2) + (late[place] || 0);
  const order = job.ranks.map((rank, place) => [rank, weight(rank, place)]);
  if (order.length > MOST_RANKS) order.sort((a, b) => b[1] - a[1] || a[0].rank - b[0].rank);
  const rows = order.slice(0, MOST_RANKS).map(([rank]) => ({
    cells: [rank.rank, or(rank.host), el("span", { class: named.has(rank.rank) ? "bad" : undefined },
      rank.phase.toLowerCase() + (named.has(rank.rank) ? " (named above)" : "")), or(rank.step),
      rank.sections.join(" > ") || "-", or(rank.heartbeat_age, spoken(rank.heartbeat_age || 0)),
      or(rank.against_peers, `${((rank.against_peers - 1) * 100).toFixed(1)} %`),
      or(rank.wait_share, percent(rank.wait_share || 0))],
  }));
  const left = job.ranks.length - rows.length;
  const caption = left > 0 ? `the ${rows.length} most remarkable ranks; ${left} more are not listed` : `${rows.length} rank(s)`;
  show(at("ranks"), table(caption, [number("Rank"), word("Host"), word("Phase"), number("Step"), word("Section"),
    number("Heartbeat"), number("Against peers"), number("Waiting")], rows));
}

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
  return [0, 2, 4].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

// One column per state, newest at the right; one row per rank, or per group of ranks.
function drawMap(ranks) {
  const rows = Math.min(ranks.length, MOST_ROWS);
  const canvas = at("map");
  [canvas.width, canvas.height] = [COLUMNS, rows];
  const [cold, hot] = [colour("--cold"), colour("--hot")];
  const context = canvas.getContext("2d");
  const image = context.createImageData(COLUMNS, rows);
  samples.columns.forEach((late, place) => {
    const x = COLUMNS - samples.columns.length + place;
    for (let row = 0; row < rows; row += 1) {
      const [from, to] = [Math.floor((row * late.length) / rows), Math.floor(((row + 1) * late.length) / rows)];
      const known = late.slice(from, Math.max(to, from + 1)).filter((of) => of !== undefined);
      if (known.length === 0) continue;
      const heat = Math.min(1, Math.max(...known));
      const pixel = 4 * (row * COLUMNS + x);
      for (let part = 0; part < 3; part += 1) image.data[pixel + part] = cold[part] + (hot[part] - cold[part]) * heat;
      image.data[pixel + 3] = 255;
    }
  });
  context.putImageData(image, 0, 0);
  const last = samples.columns[samples.columns.length - 1];
  const worst = last.reduce((most, of, place) => ((of || 0) > (last[most] || 0) ? place : most), 0);
  const text = (last[worst] || 0) > 0.2 ? `rank ${ranks[worst].rank} is the slowest` : "no rank is slower than the others";
  canvas.setAttribute("aria-label", `${ranks.length} ranks by time: ${text}`);
  at("map-caption").textContent = `Rows are ranks 0 to ${ranks.length - 1} from the top, columns the last ` +
    `${samples.columns.length} states, the newest at the right. Strong color: 30 % slower than its peers, or 4 steps behind. Now: ${text}.`;
}

const timeline = { job: undefined, cursor: 0, events: [], busy: false };

async function followIncidents(job) {
  if (timeline.job !== job) Object.assign(timeline, { job, cursor: 0, events: [], busy: false });
  if (timeline.busy) return;
  timeline.busy = true;
  try {
    for (;;) {
      const name = encodeURIComponent(job);
      const path = inlined ? `v1/events?job=${name}`
        : `v1/events?job=${name}&kind=${INCIDENT_KINDS}&limit=1000&after=${timeline.cursor}`;
      const page = await get(path);
      if (timeline.job !== job) return;
      if (inlined) timeline.events = [];
      timeline.events.push(...page.events);
      timeline.events.splice(0, Math.max(0, timeline.events.length - 2000));
      timeline.cursor = page.next_cursor;
      if (page.caught_up) break;
    }
    showIncidents(job);
  } finally {
    timeline.busy = false;
  }
}

function showIncidents(job) {
  const groups = new Map();
  for (const event of timeline.events) {
    const key = event.incident === undefined ? `finding-${event.attributes.finding || event.cursor}` : `incident-${event.incident}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(event);
  }
  const key = `${job} ${timeline.cursor} ${timeline.events.length}`;
  if (at("incidents").dataset.key === key) return;
  at("incidents").dataset.key = key;
  const open = new Set([...at("incidents").querySelectorAll("details[open]")].map((of) => of.dataset.group));
  const all = [...groups].reverse().map(([group, events]) => {
    const first = events[0];
    const isFailure = first.incident !== undefined;
    const lines = events.map((event) => el("li", {}, `${clock(event.time)}  ${event.kind.toLowerCase()}: ${event.message}`));
    const report = el("pre", { hidden: true });
    const details = el("details", { "data-group": group, class: isFailure ? "bad-edge" : undefined },
      el("summary", {}, `${clock(first.time)}  ${isFailure ? `failure ${first.incident}: ` : "finding: "}${first.message}`),
      el("ul", {}, ...lines), report);
    details.addEventListener("toggle", async () => {
      if (!details.open || !isFailure || !report.hidden) return;
      report.hidden = false;
      if (first.texts_withheld) {
        report.textContent = "withheld: for the user of the job and operators";
        return;
      }
      report.textContent = "reading the evidence";
      try {
        report.textContent = (await get(`v1/incidents/${encodeURIComponent(job)}/${first.incident}`)).text;
      } catch (error) {
        report.textContent = error.message;
      }
    });
    details.open = open.has(group) || inlined !== null;
    return details;
  });
  at("incidents").replaceChildren(...(all.length ? all : [el("p", { class: "quiet" }, "no failure and no finding")]));
}

async function apply({ node, devices, jobs, job }) {
  const now = node.server.time;
  showNode(node);
  showDevices(devices);
  showJobs(jobs, now);
  if (selected === undefined) {
    at("job").hidden = true;
  } else if (job && job.job.id === selected) {
    showJob(job.job, now);
    await followIncidents(selected).catch((error) => { at("incidents").textContent = error.message; });
  }
  say(inlined ? `report of ${clock(now)}` : `as of ${clock(now)}`);
  document.body.dataset.ready = "true";
}

function say(text, isBad) {
  at("connection").textContent = text;
  at("connection").className = isBad ? "bad" : "";
}

let stream; // of the state, with the job that it was opened for
let retry;

// Opens the stream for the selected job. Nothing is asked for a page that no one sees.
function follow() {
  clearTimeout(retry);
  if (stream) stream.source.close();
  stream = undefined;
  if (document.hidden) return;
  const job = selected;
  const source = new EventSource(job === undefined ? "v1/stream" : `v1/stream?job=${encodeURIComponent(job)}`);
  stream = { source, job };
  source.addEventListener("state", (event) => {
    apply(JSON.parse(event.data)).catch((error) => say(error.message, true));
    // The first state tells which jobs there are.
    if (selected !== job) follow();
  });
  source.addEventListener("error", () => {
    say("no answer from the server; what is shown may be old", true);
    document.body.dataset.ready = "true";
    // The browser connects again by itself, unless the server refused.
    if (source.readyState === EventSource.CLOSED) retry = setTimeout(follow, RETRY);
  });
}

async function showReport() {
  const [node, devices, jobs] = await Promise.all([get("v1/node"), get("v1/devices"), get("v1/jobs")]);
  selected = jobs.jobs.length ? jobs.jobs[0].id : undefined;
  const job = selected && await get(`v1/jobs/${encodeURIComponent(selected)}`);
  await apply({ node, devices, jobs, job });
}

if (inlined) {
  showReport().catch((error) => say(error.message, true));
} else {
  follow();
  document.addEventListener("visibilitychange", follow);
}
