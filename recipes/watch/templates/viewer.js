"use strict";
// All text of rollouts is set as text, never as HTML. The curves are HTML that the server has made and escaped.

const POLL = 2000, PAGE = 200, PREVIEW = 160;
const COLOURS = ["advantage", "log-prob", "difference", "none"];
const state = { run: null, set: "training", step: null, follow: true, filter: "", sort: "step", down: true, known: [], rows: [],
  drawn: 0, chosen: -1, group: null, groupKey: "", colour: "advantage", single: false, request: 0, detail: 0 };
const $ = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function get(path, asked = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(asked)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

const number = (value) => value === null || value === undefined ? "–"
  : Number.isInteger(value) ? String(value) : Math.abs(value) < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4));
const keyOf = (row) => `${row.step}/${row.uid}`;

function complain(error) {
  $("problem").hidden = !error;
  $("problem").textContent = error ? error.message : "";
}

// ---- the run

async function poll() {
  try {
    const run = await (await get("/api/run")).json();
    const before = state.run;
    state.run = run;
    $("state").textContent = "live";
    if (!before) start(run);
    if (!before || String(before.metrics) !== String(run.metrics)) drawCurves();
    if (!before || JSON.stringify(before.steps[state.set]) !== JSON.stringify(run.steps[state.set])) newSteps();
  } catch (error) {
    $("state").textContent = `not connected: ${error.message}`;
  }
  setTimeout(poll, POLL);
}

function start(run) {
  $("name").textContent = document.title = run.name;
  if (!Object.keys(run.steps.training).length && Object.keys(run.steps["held-out"]).length) $("set").value = state.set = "held-out";
}

const steps = () => state.run ? Object.keys(state.run.steps[state.set]).map(Number) : [];

function newSteps() {
  const select = $("step"), known = steps();
  const wanted = state.follow ? known.at(-1) ?? null : known.includes(state.step) || state.step === "all" ? state.step : known.at(-1) ?? null;
  select.replaceChildren(element("option", { value: "all" }, "all steps"),
    ...known.map((step) => element("option", { value: step }, `step ${step}`)).reverse());
  select.value = wanted ?? "all";
  const same = wanted === state.step;
  state.step = wanted;
  load(same);
}

async function drawCurves() {
  const text = await (await get("/api/curves")).text();
  const drawn = new DOMParser().parseFromString(text, "text/html").body;
  $("curves").replaceChildren(...(drawn.childElementCount ? drawn.children : [element("p", { class: "soft" }, "No metrics yet.")]));
}

// ---- rows: what is kept, which of it the filter asks for, and in which order

const read = new Map();  // the rows of each file, and the stamp that the file had

async function rowsOf(step) {
  const key = `${state.set}/${step}`, set = state.set, stamp = state.run.steps[set][step];
  if (read.get(key)?.stamp !== stamp) {
    const found = await (await get("/api/rows", { set, step })).json();
    read.set(key, { stamp, rows: found.map((row, place) => set === "training" ? { ...row, place } : answer(row, step)) });
  }
  return read.get(key).rows;
}

function answer(row, step) {  // of an evaluation, with the fields of a kept row
  return { step, uid: String(row.key), sample: 0, source: row.source ?? "", prompt: row.prompt ?? "", response: row.response ?? "",
    ground_truth: row.ground_truth ?? "", reward: row.reward ?? null,
    parts: { ...(row.accuracy == null ? {} : { acc: row.accuracy }), ...row.parts },
    truncated: false, images: row.images ?? [], sounds: row.sounds ?? [], length: null, mismatch: null };
}

const FIELDS = ["step", "sample", "reward", "length", "mismatch", "truncated"];
const TEXTS = { uid: ["uid"], source: ["source"], prompt: ["prompt"], response: ["response"], truth: ["ground_truth"],
  text: ["uid", "prompt", "response", "ground_truth"], row: ["new_row"], end: ["end_reason"] };
const COMPARISONS = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b };
const COMPARISON = /^([A-Za-z_][\w/.-]*)(>=|<=|!=|=|>|<)([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)$/i;

const fieldsOf = (rows) => [...FIELDS, ...new Set(rows.flatMap((row) => Object.keys(row.parts)))];

function valueOf(row, field) {
  const value = field === "uid" || FIELDS.includes(field) ? row[field] : row.parts[field];
  return typeof value === "boolean" ? Number(value) : value ?? null;
}

// The rows that match all terms: a comparison (reward>0.5), a text in one field (uid:7, response:"x = 3"), or a text anywhere.
function matching(rows, text) {
  if (text.split('"').length % 2 === 0) throw new Error(`filter ${text}: no closing quotation`);
  const terms = (text.match(/(?:[^\s"]|"[^"]*")+/g) ?? []).map((term) => term.replaceAll('"', ""));
  const tests = terms.map((term) => test(term, fieldsOf(rows)));
  return rows.filter((row) => tests.every((each) => each(row)));
}

function test(term, known) {
  const [, field, sign, bound] = COMPARISON.exec(term) ?? [];
  if (field && !known.includes(field)) {
    throw new Error(`no field '${field}' to compare: choose one of ${known.join(", ")}; or search for text:${term}`);
  }
  if (field) return (row) => valueOf(row, field) !== null && COMPARISONS[sign](valueOf(row, field), Number(bound));
  const [name, ...rest] = term.split(":"), named = rest.length && name in TEXTS;
  const wanted = (named ? rest.join(":") : term).toLowerCase();
  return (row) => TEXTS[named ? name : "text"].some((each) => (row[each] ?? "").toLowerCase().includes(wanted));
}

function inOrder(rows, field, down) {  // rows without a value come last, and equal ones stay in their order
  const sign = down ? -1 : 1;
  return [...rows].sort((first, second) => {
    const [a, b] = [valueOf(first, field), valueOf(second, field)];
    return a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign;
  });
}

// ---- the list

async function load(keep = false) {
  const request = ++state.request;
  try {
    const wanted = state.step === null ? [] : state.step === "all" ? steps() : [state.step];
    const found = (await Promise.all(wanted.map(rowsOf))).flat();
    if (request !== state.request) return;
    state.known = found;
    list(keep);
  } catch (error) {
    if (request === state.request) complain(error);
  }
}

function list(keep = false) {
  const before = keep ? state.rows[state.chosen] : null;
  try {
    state.rows = inOrder(matching(state.known, state.filter), state.sort, state.down);
    complain(null);
  } catch (error) {
    complain(error);
    return;
  }
  const { rows, known } = state;
  $("count").textContent = rows.length === known.length ? `${rows.length} rollouts` : `${rows.length} of ${known.length}`;
  const fields = ["uid", ...fieldsOf(known)];
  if (!fields.includes(state.sort)) fields.push(state.sort);
  $("sort").replaceChildren(...fields.map((field) => element("option", { value: field }, `by ${field}`)));
  $("sort").value = state.sort;
  const same = before ? rows.findIndex((row) => keyOf(row) === keyOf(before) && row.sample === before.sample) : -1;
  $("list").replaceChildren();
  $("list").scrollTop = state.drawn = 0;
  drawUpTo(Math.max(same, 0) + PAGE);
  choose(Math.max(same, 0));
}

function drawUpTo(end) {
  $("list").append(...state.rows.slice(state.drawn, end).map((row, index) => entry(row, state.drawn + index)));
  state.drawn = Math.max(state.drawn, Math.min(end, state.rows.length));
}

function entry(row, index) {
  const measured = row.reward !== null ? `reward ${number(row.reward)}` : "loss" in row.parts ? `loss ${number(row.parts.loss)}` : "";
  const facts = [measured, row.length === null ? "" : `${row.length} tokens`,
    row.truncated ? "cut" : ""].filter(Boolean).join(" · ");
  const mismatch = row.mismatch === null ? "" : ` · mismatch ${number(+row.mismatch.toPrecision(2))}`;
  const line = element("div", { class: "line" }, element("div", { class: "facts" }, facts),
    element("div", {}, row.response.slice(0, PREVIEW) || "(empty)"),
    element("div", { class: "soft" }, `step ${row.step}${mismatch} · ${row.uid}`));
  const picture = row.images.length ? [element("img", { src: `/images/${row.images[0]}`, alt: "", loading: "lazy" })] : [];
  const made = element("li", { role: "option", id: `row-${index}`, "aria-selected": "false" }, ...picture, line);
  made.dataset.index = index;
  return made;
}

function choose(index) {
  $(`row-${state.chosen}`)?.setAttribute("aria-selected", "false");
  state.chosen = state.rows.length ? Math.min(Math.max(index, 0), state.rows.length - 1) : -1;
  if (state.chosen > state.drawn - 20) drawUpTo(state.chosen + PAGE);
  const made = $(`row-${state.chosen}`);
  if (made) {
    made.setAttribute("aria-selected", "true");
    made.scrollIntoView({ block: "nearest" });
    $("list").setAttribute("aria-activedescendant", made.id);
  }
  showGroup();
}

// ---- the group

async function showGroup() {
  const row = state.rows[state.chosen], request = ++state.detail;
  if (!row) {
    state.groupKey = "";
    $("detail").replaceChildren(element("p", { class: "soft" }, state.run && steps().length ? "No rollout matches." : "No rollouts are kept yet."));
    return;
  }
  const stamps = state.run.steps[state.set], key = JSON.stringify([state.set, keyOf(row), state.set === "training" ? stamps[row.step] : stamps]);
  if (key !== state.groupKey) {
    try {
      const group = await groupOf(row);
      if (request !== state.detail) return;
      state.group = group;
      state.groupKey = key;
      drawGroup();
    } catch (error) {
      if (request === state.detail) complain(error);
      return;
    }
  }
  for (const made of document.querySelectorAll(".sample")) {
    const chosen = made.dataset.sample === String(row.sample) && made.dataset.step === String(row.step);
    made.classList.toggle("chosen", chosen);
    if (chosen) made.scrollIntoView({ block: "nearest" });
  }
}

async function groupOf(row) {  // the samples of a step with their tokens, or the answers of all evaluations
  if (state.set !== "training") {
    return (await Promise.all(steps().map(rowsOf))).flat().filter((each) => each.uid === row.uid);
  }
  const [rows, tokens] = [await rowsOf(row.step), await tokensOf(row.step)];
  if (rows.length !== tokens.length) throw new Error(`step ${row.step}: ${rows.length} rows, but the tokens of ${tokens.length}`);
  return rows.filter((each) => each.uid === row.uid).map((each) => ({ ...each, ...tokens[each.place] }));
}

let tokens = {};  // of the step that was read last

async function tokensOf(step) {
  const stamp = state.run.steps.training[step];
  if (tokens.step !== step || tokens.stamp !== stamp) {
    tokens = { step, stamp, rows: await (await get("/api/tokens", { step })).json() };
  }
  return tokens.rows;
}

function drawGroup() {
  const [first] = state.group;
  if (state.colour === "advantage" && first.tokens && !first.advantages) state.colour = "log-prob";  // rows of supervised training
  const pictures = inPlace(first) ? [] : first.images.map((name, index) => picture(name, `picture ${index + 1} of the prompt`));
  pictures.push(...(first.sounds ?? []).map((name) => element("audio", { src: `/images/${name}`, controls: "", preload: "metadata" })));
  const question = element("div", { class: "question" }, element("p", { class: "prompt" }, first.prompt),
    ...(first.ground_truth ? [element("p", { class: "truth" }, element("span", { class: "soft" }, "Answer "), element("b", {}, first.ground_truth))] : []),
    element("p", { class: "soft uid" }, `${first.uid}${first.source ? ` · ${first.source}` : ""}`));
  const colour = element("select", { id: "colour", "aria-label": "Colour of tokens" },
    ...COLOURS.map((name) => element("option", { value: name }, `colour: ${name}`)));
  colour.value = state.colour;
  colour.addEventListener("change", () => { state.colour = colour.value; paint(); colour.blur(); });
  const one = element("button", { id: "single", "aria-pressed": String(!state.single) }, "side by side");
  one.addEventListener("click", toggleSingle);
  const tools = element("div", { class: "tools" }, colour, one, element("span", { class: "scale", id: "scale" }));
  const made = element("div", { class: "group", id: "group" }, ...state.group.map(sample));
  made.classList.toggle("single", state.single);
  $("detail").replaceChildren(
    element("div", { class: "problem-head" }, ...(pictures.length ? [element("div", { class: "pictures" }, ...pictures)] : []), question),
    tools, made, element("p", { id: "token" }, "Point at a token to see its numbers."));
  $("detail").scrollTop = 0;
  paint();
}

function picture(name, alt) {
  const made = element("img", { src: `/images/${name}`, alt });
  made.addEventListener("load", () => made.classList.toggle("tiny", made.naturalWidth < 160));
  return made;
}

function badge(text, kind = "") {
  return element("span", { class: `badge ${kind}` }, text);
}

function sample(row, index) {
  const parts = Object.entries(row.parts).map(([name, value]) => badge(`${name} ${number(value)}`,
    name !== "acc" || value === null ? "" : value >= 0.5 ? "good" : "bad"));
  const facts = row.reward === null ? parts : [badge(`reward ${number(row.reward)}`), ...parts];
  if (row.length !== null) facts.push(badge(`${row.length} tokens`));
  if (row.truncated) facts.push(badge("cut", "bad"));
  if (row.mismatch !== null) facts.push(badge(`mismatch ${number(row.mismatch)}`));
  if (row.new_row) facts.push(badge(`new row: ${row.new_row}`));
  if (row.end_reason && row.end_reason !== "done") facts.push(badge(`ended: ${[row.end_reason, row.end_message].filter(Boolean).join(", ")}`, "bad"));
  const title = state.set !== "training" ? `step ${row.step}` : row.trajectory ? episodeOf(row) : `sample ${row.sample}`;
  const text = row.trajectory && row.texts ? conversation(row) : element("pre", { class: "tokens" });
  if (row.tokens && !text.childElementCount) {
    text.append(...row.tokens.map((_, place) => tokenOf(row, place)));
  } else if (!row.tokens) {
    text.textContent = row.response || "(empty)";
  }
  const made = element("section", { class: "sample" }, element("header", {}, element("b", {}, title), ...facts), text);
  Object.assign(made.dataset, { sample: row.sample, step: row.step, index });
  return made;
}

function tokenOf(row, place) {
  const token = element("span", {}, row.texts ? row.texts[place] : `[${row.tokens[place]}]`);
  if (!row.sampled[place]) token.className = "given";
  token.dataset.place = place;
  return token;
}

// ---- an episode, as a conversation

const inPlace = (row) => row.media && row.media.length && row.media.length === row.images.length;  // pictures, not frames of videos
const BEGIN = /<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>/;
const MARK = /^(<\|[^|]*\|>|<(start|end)_of_(turn|image)>)$/;

function episodeOf(row) {
  const names = [...new Set(state.group.map((each) => each.trajectory))];
  const own = state.group.filter((each) => each.trajectory === row.trajectory);
  const part = own.length > 1 ? `, row ${own.findIndex((each) => each.sample === row.sample) + 1} of ${own.length}` : "";
  return `episode ${names.indexOf(row.trajectory)}${part}`;
}

// The messages of a row: {own, places}, of which a sampled one begins with what the template writes before it.
function messagesOf(row) {
  const found = [];
  row.texts.forEach((text, place) => {
    const last = found.at(-1), sampled = Boolean(row.sampled[place]);
    const header = last && !last.own && BEGIN.test(last.text) && !last.text.split("\n").slice(1).join("").trim();
    if (last && sampled && header) Object.assign(last, { own: true, from: place });
    else if (!last || sampled !== last.own || (!sampled && BEGIN.test(text))) found.push({ own: sampled, places: [], text: "", from: place });
    found.at(-1).places.push(place);
    found.at(-1).text += text;
  });
  return found.filter((message) => message.own || message.text.trim());
}

function conversation(row) {
  const media = new Map(inPlace(row) ? row.media.map(([place, count], index) => [place, { count, name: row.images[index] }]) : []);
  return element("div", { class: "tokens talk" }, ...messagesOf(row).map((message) => {
    const [begin, name] = /(?:<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>)(\w+)[^\n]*\n/.exec(message.text) ?? ["", ""];
    const role = message.own ? `turn ${row.turn[message.from]}` : message.text.includes("<tool_response>") ? "tool" : name || "observation";
    const reward = message.own ? message.places.reduce((sum, place) => sum + (row.rewards?.[place] ?? 0), 0) : 0;
    const text = element("pre");
    let read = 0, until = -1;
    for (const place of message.places) {
      const shown = media.get(place), given = !row.sampled[place];
      const plumbing = given && (read < begin.length || MARK.test(row.texts[place]));
      read += row.texts[place].length;
      if (shown) {
        text.append(picture(shown.name, `picture of ${role}`));
        until = place + shown.count;
      }
      if (!plumbing && place >= until) text.append(tokenOf(row, place));
    }
    const kind = message.own ? "own" : role === "system" ? "system" : "";
    return element("div", { class: `message ${kind}` }, element("b", { class: "soft" }, role),
      ...(reward ? [badge(`reward ${number(reward)}`, reward > 0 ? "good" : "bad")] : []), text);
  }));
}

const NUMBERS = {
  advantage: (row, place) => row.advantages?.[place],
  "log-prob": (row, place) => row.engine_log_probs?.[place] ?? row.actor_log_probs?.[place],
  difference: (row, place) => row.engine_log_probs && row.actor_log_probs && row.engine_log_probs[place] !== null
    && row.actor_log_probs[place] !== null ? row.actor_log_probs[place] - row.engine_log_probs[place] : null,
};
const LEAST_DIFFERENCE = 0.01;  // nats: below it the two probabilities differ by less than 1 %
const GOOD = "31, 157, 107", BAD = "201, 48, 79", ODD = "224, 118, 47";

function paint() {
  const value = NUMBERS[state.colour];
  const every = value ? state.group.flatMap((row) => (row.tokens || []).map((_, place) => row.sampled[place] ? value(row, place) : null)) : [];
  const known = every.filter((each) => each !== null && each !== undefined).map(Math.abs);
  const least = state.colour === "difference" ? LEAST_DIFFERENCE : 1e-9;  // numbers below it are as good as 0
  const most = known.reduce((high, each) => Math.max(high, each), least);
  const one = state.colour === "log-prob";
  for (const made of document.querySelectorAll(".sample")) {
    const row = state.group[Number(made.dataset.index)];
    for (const token of made.querySelectorAll(".tokens span")) {
      const place = Number(token.dataset.place), found = value && row.sampled[place] ? value(row, place) : null;
      const strength = found === null || found === undefined ? 0 : 0.75 * Math.min(Math.abs(found) / most, 1);
      token.style.backgroundColor = strength ? `rgba(${one ? ODD : found > 0 ? GOOD : BAD}, ${strength.toFixed(3)})` : "";
    }
  }
  const bar = element("i");
  bar.style.background = `linear-gradient(to right, rgba(${one ? ODD : BAD}, .75), transparent${one ? "" : `, rgba(${GOOD}, .75)`})`;
  const text = state.colour === "difference" ? "actor − engine, nats" : one ? `${state.group.some((row) => row.engine_log_probs) ? "engine's " : ""}log-prob, nats` : "advantage";
  $("scale").replaceChildren(...(value ? known.length ? [number(-most), bar, `${one ? "0" : number(most)} ${text}`] : [`no ${state.colour} kept`] : []));
  $("colour").value = state.colour;
}

function tell(token) {
  const row = state.group[Number(token.closest(".sample").dataset.index)], place = Number(token.dataset.place);
  const facts = [`${JSON.stringify(token.textContent)} id ${row.tokens[place]}`];
  if (!row.sampled[place]) facts.push("not sampled");
  for (const [name, list] of [["advantage", row.advantages], ["engine", row.engine_log_probs], ["actor", row.actor_log_probs]]) {
    if (list) facts.push(`${name} ${number(list[place])}`);
  }
  const off = NUMBERS.difference(row, place);
  if (off !== null && off !== undefined) facts.push(`difference ${number(off)}`);
  $("token").textContent = facts.join(" · ");
}

// ---- what the reader does

function setFollow(follow) {
  state.follow = $("follow").checked = follow;
  if (follow) newSteps();
}

function goToStep(step) {
  setFollow(false);
  state.step = step;
  $("step").value = step;
  load();
}

function move(by) {
  setFollow(false);
  choose(state.chosen + by);
}

function moveStep(by) {
  const known = steps();
  if (!known.length) return;
  const now = known.indexOf(state.step);
  goToStep(known[now < 0 ? known.length - 1 : Math.min(Math.max(now + by, 0), known.length - 1)]);
}

function toggleSingle() {
  state.single = !state.single;
  $("group")?.classList.toggle("single", state.single);
  $("single")?.setAttribute("aria-pressed", String(!state.single));
}

function nextColour() {
  state.colour = COLOURS[(COLOURS.indexOf(state.colour) + 1) % COLOURS.length];
  if (state.group && $("group")) paint();
}

function show(name) {
  location.hash = `tab-${name}`;
  showTab();
}

function showTab() {
  const name = location.hash === "#tab-curves" ? "curves" : "rollouts";
  for (const each of ["rollouts", "curves"]) {
    $(each).hidden = each !== name;
    $(`show-${each}`).toggleAttribute("aria-current", each === name);
  }
}

const KEYS = {
  j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
  ArrowRight: () => moveStep(1), ArrowLeft: () => moveStep(-1), t: nextColour, g: toggleSingle,
  f: () => setFollow(!state.follow), c: () => show($("curves").hidden ? "curves" : "rollouts"),
  "/": () => { show("rollouts"); $("filter").focus(); $("filter").select(); },
  "?": () => $("keys").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  if (event.target === $("filter")) {
    if (event.key === "Enter" || event.key === "Escape") { event.preventDefault(); $("list").focus(); }
    return;
  }
  if (event.target instanceof HTMLSelectElement) return;
  const action = KEYS[event.key];
  if (action) { event.preventDefault(); action(); }
});

let typing;
$("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => { state.filter = $("filter").value; list(); }, 150);
});
$("set").addEventListener("change", () => { state.set = $("set").value; state.step = undefined; state.sort = "step"; newSteps(); $("set").blur(); });
$("step").addEventListener("change", () => { const value = $("step").value; goToStep(value === "all" ? value : Number(value)); $("step").blur(); });
$("sort").addEventListener("change", () => { state.sort = $("sort").value; list(); $("sort").blur(); });
$("order").addEventListener("click", () => { state.down = !state.down; $("order").textContent = state.down ? "↓" : "↑"; list(); });
$("follow").addEventListener("change", () => setFollow($("follow").checked));
addEventListener("hashchange", showTab);
$("show-keys").addEventListener("click", () => $("keys").showModal());
$("list").addEventListener("click", (event) => {
  const made = event.target.closest("li");
  if (made) { setFollow(false); choose(Number(made.dataset.index)); }
});
$("list").addEventListener("scroll", () => {
  const list = $("list");
  if (list.scrollTop + list.clientHeight > list.scrollHeight - 600) drawUpTo(state.drawn + PAGE);
});
$("detail").addEventListener("click", (event) => {
  const made = event.target.closest(".sample");
  if (!made) return;
  const index = state.rows.findIndex((row) => row.uid === state.group[0].uid && String(row.sample) === made.dataset.sample
    && String(row.step) === made.dataset.step);
  if (index >= 0) { setFollow(false); choose(index); }
});
$("detail").addEventListener("pointerover", (event) => {
  const token = event.target.closest(".tokens span");
  if (token) tell(token);
});
$("order").textContent = "↓";
showTab();
poll();
