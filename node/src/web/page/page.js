// The page of one host: follows /api/v1/stream and shows it. Every text from outside goes through textContent and is never taken for markup.
import { History, bar, draw } from "./charts.js";

const SECONDS = 60;
const CHARTS = ["pauses", "sent", "held", "answers"];
const MOST_EVENTS = 200;
// With more VMs than these their figures are folded until somebody opens them.
const UNFOLDED = 6;
// An event's text that is longer is shown in a window of its own, which can be scrolled.
const LONG_TEXT = 600;

const get = (id) => document.getElementById(id);
const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
const mark = (element, name, value) => {
  if (element.dataset[name] !== value) element.dataset[name] = value;
};
const stamp = (id) => get(id).content.firstElementChild.cloneNode(true);
const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;

const state = { me: null, overview: null, events: new Map(), cards: new Map(), folds: new Map(), told: 0 };

const PROTECTION = {
  "protected": ["good", "Protected"],
  "not-asked": ["plain", "Not asked for"],
  "joining": ["warning", "Becoming protected"],
  "unprotected": ["bad", "Not protected"],
  "not-served": ["bad", "Not served"],
};
// The worst first.
const ORDER = ["not-served", "unprotected", "joining", "protected", "not-asked"];
const REASONS = [
  ["idle", "both idle"],
  ["limit", "longest interval"],
  ["quiet", "old enough"],
  ["disk", "disk buffers"],
  ["differs", "outputs differed"],
  ["change_over", "change of manner"],
  ["memory", "memory half full"],
];
const ORDERS = {
  switchover: {
    title: (vm) => `Hand ${vm.name} over to its backup?`,
    text: (vm) => `${vm.name} goes on on host ${vm.backup}, and host ${vm.primary} becomes its backup. Clients keep their connections.`,
    yes: "Switch over",
    done: (vm) => `${vm.name} was handed over.`,
    can: (vm) => vm.protection === "protected",
    cannot: "Only a protected VM can be handed over",
  },
  protect: {
    title: (vm) => `Protect ${vm.name} now?`,
    text: () => "A backup is brought in at once, where it would be tried again later. The VM runs on meanwhile.",
    yes: "Protect",
    done: (vm) => `A backup is brought in for ${vm.name}.`,
    // A bare program gets its second copy by itself.
    can: (vm) => !vm.program && (vm.protection === "unprotected" || vm.protection === "not-asked"),
    cannot: "It is protected, or becomes so by itself",
  },
  down: {
    title: (vm) => `Shut ${vm.name} down?`,
    text: (vm) => `The guest is told to switch itself off, and ${vm.name} ends on all its hosts. Its clients lose it until somebody starts it again.`,
    yes: "Shut down",
    risky: true,
    done: (vm) => `${vm.name} was shut down.`,
    can: () => true,
    cannot: "",
  },
};

/* ---- figures ---- */

const units = (figure, names, step) => {
  let at = 0;
  while (figure >= step && at < names.length - 1) {
    figure /= step;
    at += 1;
  }
  return `${figure >= 100 || figure === 0 ? figure.toFixed(0) : figure.toFixed(1)} ${names[at]}`;
};
const bytes = (figure) => units(figure, ["B/s", "KiB/s", "MiB/s", "GiB/s"], 1024);
const ms = (figure) => `${figure >= 100 || figure === 0 ? figure.toFixed(0) : figure.toFixed(1)} ms`;

// What became of counters since the last look; null where one went back, as after a take-over.
function since(before, now, seconds) {
  if (!before || !now || before.term !== now.term || seconds <= 0) return null;
  const more = (of) => of(now) - of(before);
  const released = more((figures) => figures.compared.released);
  const all = [more((figures) => figures.pause_us), more((figures) => figures.sent_bytes), released];
  if (all.some((figure) => figure < 0)) return null;
  return {
    pauses: more((figures) => figures.pause_us) / 1e3 / seconds,
    sent: more((figures) => figures.sent_bytes) / seconds,
    held: released > 0 ? more((figures) => figures.compared.held_us) / released / 1e3 : 0,
    answers: now.answers ? now.answers.p99_us / 1e3 : null,
  };
}

/* ---- hosts ---- */

function showHosts(overview) {
  const list = get("hosts");
  overview.hosts.forEach((host, at) => {
    const item = list.children[at] ?? list.appendChild(stamp("host"));
    mark(item, "reached", host.reached ? "yes" : host.problem ? "no" : "waits");
    say(item.querySelector("h3"), host.name + (host.name === overview.host ? " (this page's)" : ""));
    const serves = host.serves.length ? `runs ${host.serves.join(", ")}` : "runs no VM as primary";
    say(item.querySelector(".state"), host.reached ? serves : host.problem ?? "is being asked");
    const more = [host.address];
    if (host.version) more.push(`version ${host.version}`);
    if (host.links && host.links !== "TLS") more.push(`links: ${host.links}`);
    say(item.querySelector(".more"), [more.join(" · "), ...host.words].join(" — "));
  });
  while (list.children.length > overview.hosts.length) list.lastChild.remove();
}

/* ---- VMs ---- */

function seatsOf(vm) {
  const rank = (host) => (host.host === vm.primary ? 0 : host.host === vm.backup ? 1 : host.can_run ? 2 : 3);
  return [...vm.hosts].sort((one, other) => rank(one) - rank(other));
}

function partOf(host, vm) {
  if (host.role === "primary" && host.host !== vm.primary) return "was primary";
  if (host.role === "unknown") return host.can_run ? "not heard" : "witness, not heard";
  if (host.role === "none") return host.can_run ? "no copy" : "witness";
  const state = host.role === "backup" && host.state !== "running" ? `, ${host.state}` : "";
  return host.role + (host.role === "primary" && host.state === "stalled" ? ", waits" : state);
}

function showSeats(list, vm) {
  const seats = seatsOf(vm);
  seats.forEach((host, at) => {
    let item = list.children[at];
    if (!item) {
      item = list.appendChild(document.createElement("li"));
      item.className = "seat";
      item.append(document.createElement("strong"), document.createElement("span"));
      item.lastChild.className = "part";
    }
    // One that was heard last before another took over.
    mark(item, "role", host.role === "primary" && host.host !== vm.primary ? "unknown" : host.role);
    say(item.firstChild, host.host);
    say(item.lastChild, partOf(host, vm));
  });
  while (list.children.length > seats.length) list.lastChild.remove();
}

function card(vm) {
  let card = state.cards.get(vm.name);
  if (card) return card;
  const element = stamp("vm");
  card = { element, vm, before: null, at: 0, reasons: [] };
  card.histories = Object.fromEntries(CHARTS.map((name) => [name, new History(SECONDS)]));
  const title = element.querySelector("h3");
  title.id = `vm-${state.cards.size}-${Math.random().toString(36).slice(2)}`;
  element.setAttribute("aria-labelledby", title.id);
  element.querySelector("button.more").addEventListener("click", () => {
    state.folds.set(vm.name, !isFolded(vm.name));
    fold(card);
  });
  for (const button of element.querySelectorAll("button[data-do]")) {
    button.addEventListener("click", () => ask(button.dataset.do, card));
  }
  state.cards.set(vm.name, card);
  return card;
}

const isFolded = (name) => state.folds.get(name) ?? (state.overview?.vms.length ?? 0) > UNFOLDED;

function fold(card) {
  const folded = isFolded(card.vm.name);
  const button = card.element.querySelector("button.more");
  if (button.getAttribute("aria-expanded") !== String(!folded)) button.setAttribute("aria-expanded", String(!folded));
  const has = card.vm.figures !== null;
  button.hidden = !has;
  card.element.querySelector(".figures").hidden = folded || !has;
  card.element.querySelector(".facts").hidden = folded || !has;
}

function showVm(vm) {
  const shown = card(vm);
  shown.vm = vm;
  const { element } = shown;
  const [tone, words] = PROTECTION[vm.protection] ?? ["plain", vm.protection];
  mark(element, "tone", tone);
  mark(element, "protection", vm.protection);
  say(element.querySelector("h3"), vm.name);
  say(element.querySelector(".badge"), words);
  say(element.querySelector(".why"), vm.why);
  say(element.querySelector(".todo"), vm.todo);
  const progress = element.querySelector(".progress");
  progress.hidden = vm.progress === null;
  if (vm.progress) {
    say(progress.querySelector("span"), vm.progress.what);
    progress.querySelector("progress").value = vm.progress.done / Math.max(vm.progress.total, 1);
  }
  showSeats(element.querySelector(".seats"), vm);
  say(element.querySelector(".facts"), factsOf(vm));
  fold(shown);
  for (const button of element.querySelectorAll("button[data-do]")) {
    const order = ORDERS[button.dataset.do];
    button.hidden = state.me?.role === "viewer";
    const can = order.can(vm);
    // Not `disabled`: it keeps the focus, and says why.
    button.setAttribute("aria-disabled", String(!can));
    button.title = can ? "" : order.cannot;
    button.setAttribute("aria-label", `${order.yes} ${vm.name}`);
    button.classList.toggle("off", !can);
  }
  return element;
}

function factsOf(vm) {
  const figures = vm.figures;
  if (!figures) return "";
  const facts = [`policy ${vm.policy}${figures.manner ? ` (${figures.manner})` : ""}`, `term ${figures.term}`, `epoch ${figures.epoch}`];
  if (figures.syncs) facts.push(`pause ${ms(figures.median.pause_us / 1e3)} in the median of ${count(figures.syncs, "sync", "syncs")}`);
  if (figures.aborted) facts.push(`${figures.aborted} given up`);
  if (figures.stalls) facts.push(count(figures.stalls, "stall", "stalls"));
  if (figures.fullest_queue_percent > 50) facts.push(`a queue is ${figures.fullest_queue_percent} % full`);
  if (vm.failover) {
    const step = vm.failover;
    facts.push(`last take-over ${ms((step.detected_us + step.elected_us + step.applied_us + step.announced_us) / 1e3)}`);
  }
  return facts.join(" · ");
}

function showVms(overview) {
  const rank = (vm) => ORDER.indexOf(vm.protection);
  const vms = [...overview.vms].sort((one, other) => rank(one) - rank(other) || one.name.localeCompare(other.name));
  const list = get("vms");
  const known = new Set(vms.map((vm) => vm.name));
  for (const [name, gone] of state.cards) {
    if (known.has(name)) continue;
    gone.element.remove();
    state.cards.delete(name);
  }
  vms.forEach((vm, at) => {
    const element = showVm(vm);
    // A card that has the focus is not taken out and put in again.
    if (list.children[at] !== element && !element.contains(document.activeElement)) list.insertBefore(element, list.children[at] ?? null);
    else if (!element.isConnected) list.append(element);
  });
  get("no-vms").hidden = vms.length > 0;
}

function showSum(overview) {
  const of = (level) => overview.vms.filter((vm) => vm.protection === level);
  const lost = overview.hosts.filter((host) => !host.reached && host.problem);
  const [gone, bare, joining, safe] = ["not-served", "unprotected", "joining", "protected"].map(of);
  const names = (vms) => vms.slice(0, 5).map((vm) => vm.name).join(", ") + (vms.length > 5 ? ` and ${vms.length - 5} more` : "");
  let level = "good";
  let title = safe.length ? `${count(safe.length, "VM is", "VMs are")} protected` : "Nothing to protect";
  let text = "Each of them survives the death of either of its hosts.";
  if (!safe.length) text = overview.vms.length ? "No VM asks for protection." : "No VM is on these hosts.";
  if (lost.length) {
    text = safe.length ? `${title} all the same.` : text;
    title = `${lost.length === 1 ? "Host" : "Hosts"} ${lost.map((host) => host.name).join(", ")} ${lost.length === 1 ? "is" : "are"} not reached`;
    level = "warning";
  }
  if (joining.length) [level, title, text] = ["warning", `${names(joining)} ${joining.length === 1 ? "is" : "are"} becoming protected`, "A second copy is being made; until it is there, one host is all."];
  if (bare.length) [level, title, text] = ["bad", `${names(bare)} ${bare.length === 1 ? "is" : "are"} not protected`, "If the host that runs it dies now, it dies with it. Why, is below."];
  if (gone.length) [level, title, text] = ["bad", `${names(gone)} ${gone.length === 1 ? "is" : "are"} not served`, "No host runs it now. Why, is below."];
  mark(get("sum"), "level", level);
  get("sum-mark").setAttribute("d", level === "good" ? "m8 12 3 3 5-6" : "M12 8v5m0 3v.1");
  say(get("sum-title"), title);
  say(get("sum-text"), text);
  // Pages of several clusters may be open beside each other.
  const [only] = overview.vms.length === 1 ? overview.vms : [];
  const first = level === "good" ? only?.name : `! ${title}`;
  document.title = [first, overview.cluster, "Dunlin"].filter(Boolean).join(" – ");
}

function show(overview) {
  state.overview = overview;
  say(get("cluster"), overview.cluster);
  showSum(overview);
  showHosts(overview);
  showVms(overview);
  const about = get("about");
  const names = ["", ...overview.vms.map((vm) => vm.name)];
  if (names.join("\n") !== [...about.options].map((option) => option.value).join("\n")) {
    const chosen = about.value;
    about.replaceChildren(...names.map((name) => new Option(name || "everything", name)));
    about.value = names.includes(chosen) ? chosen : "";
  }
}

// Once a second, also when nothing has changed: a chart has a figure for each second.
function tick() {
  if (get("link").dataset.link !== "live") return;
  const now = performance.now();
  for (const card of state.cards.values()) {
    const { vm, element, histories } = card;
    const rates = since(card.before, vm.figures, (now - card.at) / 1e3);
    [card.before, card.at] = [vm.figures, now];
    for (const name of CHARTS) histories[name].push(rates ? rates[name] : null);
    card.reasons.push(vm.figures?.reasons ?? null);
    if (card.reasons.length > SECONDS) card.reasons.shift();
    if (!vm.figures || isFolded(vm.name)) continue;
    const words = {
      pauses: rates ? `${ms(rates.pauses)}/s` : "–",
      sent: rates ? bytes(rates.sent) : "–",
      held: rates ? ms(rates.held) : "–",
      answers: vm.figures.answers ? `${ms(vm.figures.answers.p50_us / 1e3)} / ${ms(vm.figures.answers.p99_us / 1e3)}` : "–",
    };
    const labels = { pauses: "Stands still for syncs", sent: "Sent by syncs", held: "Added by protection: how long frames are held", answers: "How long clients wait, median and 99th percentile" };
    for (const name of CHARTS) {
      const figure = element.querySelector(`.${name}`);
      say(figure.querySelector("figcaption b"), words[name]);
      draw(figure.querySelector("svg"), histories[name], `${labels[name]}, the last minute; now ${words[name]}`);
    }
    showReasons(element.querySelector(".reasons"), card);
  }
}

function showReasons(figure, card) {
  const now = card.vm.figures.reasons;
  const first = card.reasons.find((reasons) => reasons !== null) ?? now;
  const shares = REASONS.map(([key]) => Math.max(now[key] - first[key], 0));
  const some = REASONS.map(([, name], at) => [at, name, shares[at]]).filter(([, , share]) => share > 0);
  const whole = shares.reduce((sum, share) => sum + share, 0);
  const words = some.map(([, name, share]) => `${name} ${share}`).join(", ");
  say(figure.querySelector("figcaption b"), whole ? `${count(whole, "sync", "syncs")} in a minute` : "no sync in a minute");
  bar(figure.querySelector("svg"), shares, words || "no sync");
  const list = figure.querySelector("ul");
  const key = some.map(([at]) => at).join();
  if (list.dataset.key !== key) {
    list.dataset.key = key;
    list.replaceChildren(
      ...some.map(([at]) => {
        const item = document.createElement("li");
        const swatch = document.createElement("span");
        swatch.className = `swatch r${at}`;
        item.append(swatch, document.createElement("span"));
        return item;
      }),
    );
  }
  some.forEach(([, name, share], at) => say(list.children[at].lastChild, `${name} ${share}`));
}

/* ---- events ---- */

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

function timeOf(event) {
  const at = new Date(event.time_ms);
  const today = at.toDateString() === new Date().toDateString();
  return today ? clock.format(at) : `${day.format(at)}, ${clock.format(at)}`;
}

function happened({ event, meaning, tone }) {
  const key = `${event.host} ${event.seq} ${event.time_ms}`;
  if (state.events.has(key)) return;
  const item = stamp("event");
  mark(item, "tone", tone);
  mark(item, "vm", event.vm);
  const time = item.querySelector("time");
  time.dateTime = new Date(event.time_ms).toISOString();
  say(time, timeOf(event));
  const text = item.querySelector(".text");
  say(text, event.text);
  // By keyboard, too.
  if (event.text.length > LONG_TEXT) text.tabIndex = 0;
  say(item.querySelector(".meaning"), meaning);
  say(item.querySelector(".of"), [event.vm, event.kind, `host ${event.host}`].filter(Boolean).join(" · "));
  item.hidden = isOfAnother(item);
  state.events.set(key, { item, time_ms: event.time_ms });
  const list = get("events");
  // The newest first; hosts tell at different times.
  let next = list.firstElementChild;
  while (next && Date.parse(next.querySelector("time").dateTime) > event.time_ms) next = next.nextElementSibling;
  list.insertBefore(item, next);
  if (state.events.size > MOST_EVENTS) {
    const oldest = list.lastElementChild;
    for (const [name, { item }] of state.events) if (item === oldest) state.events.delete(name);
    oldest.remove();
  }
  get("no-events").hidden = true;
}

const isOfAnother = (item) => get("about").value !== "" && item.dataset.vm !== get("about").value;

/* ---- orders ---- */

function tell(text) {
  say(get("told"), text);
  clearTimeout(state.told);
  state.told = setTimeout(() => say(get("told"), ""), 8000);
}

function ask(what, card) {
  const order = ORDERS[what];
  const { vm } = card;
  if (!order.can(vm)) return tell(`${vm.name}: ${order.cannot}.`);
  say(get("ask-title"), order.title(vm));
  say(get("ask-text"), order.text(vm));
  say(get("ask-wrong"), "");
  const [yes, no, dialog] = [get("ask-yes"), get("ask-no"), get("ask")];
  say(yes, order.yes);
  yes.classList.toggle("risky", Boolean(order.risky));
  yes.disabled = false;
  yes.onclick = async () => {
    yes.disabled = true;
    const refused = await post(`/api/v1/vms/${encodeURIComponent(vm.name)}/${what}`);
    if (!dialog.open) return tell(refused ?? order.done(vm));
    yes.disabled = false;
    if (refused) {
      say(get("ask-wrong"), refused);
      // While it was disabled it could not keep the focus.
      return yes.focus();
    }
    dialog.close();
    tell(order.done(vm));
  };
  no.onclick = () => dialog.close();
  dialog.showModal();
  no.focus();
}

// Nothing, or one line that says why not.
async function post(path) {
  try {
    const headers = { "Content-Type": "application/json", "X-Dunlin-Token": state.me.token };
    const response = await fetch(path, { method: "POST", headers, body: "{}" });
    const answer = await response.json();
    return response.ok ? null : answer.why;
  } catch {
    return "This host does not answer. What was asked may have been done: the events tell.";
  }
}

/* ---- the stream ---- */

function link(kind, text) {
  mark(get("link"), "link", kind);
  say(get("link-text"), text);
}

async function who() {
  const response = await fetch("/api/v1/me");
  const me = await response.json();
  if (!response.ok) throw new Error(me.why);
  state.me = me;
  say(get("where"), `seen from host ${me.host}`);
  say(get("foot"), `${me.user}, ${me.role} · Dunlin ${me.version}`);
}

async function begin() {
  try {
    await who();
  } catch (error) {
    link("lost", "no answer");
    say(get("sum-title"), "This host does not answer");
    say(get("sum-text"), error instanceof TypeError ? "It is asked again." : error.message);
    mark(get("sum"), "level", "bad");
    setTimeout(begin, 3000);
    return;
  }
  const stream = new EventSource("/api/v1/stream");
  stream.addEventListener("open", () => link("live", "live"));
  stream.addEventListener("overview", (event) => show(JSON.parse(event.data)));
  stream.addEventListener("happened", (message) => happened(JSON.parse(message.data)));
  stream.addEventListener("ended", (message) => {
    // A person's certificate counts no more: asking again would end at the door.
    stream.close();
    link("lost", "ended");
    say(get("sum-title"), "You are not shown any more");
    say(get("sum-text"), `${JSON.parse(message.data).why}; then open this page again.`);
    mark(get("sum"), "level", "bad");
  });
  stream.addEventListener("error", () => {
    link("lost", "connection lost");
    // The daemon may be another one by now, with another token.
    stream.close();
    setTimeout(begin, 2000);
  });
}

get("about").addEventListener("change", () => {
  for (const item of get("events").children) item.hidden = isOfAnother(item);
});
setInterval(tick, 1000);
begin();
