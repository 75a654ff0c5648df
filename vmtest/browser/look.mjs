// A real Chromium before the page, steered by lines of JSON on standard input; each is answered by one on standard output:
// {"ok": true, "said": ...} or {"ok": false, "why": "one line"}. What is asked: src/page/browser.rs.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";
import puppeteer from "puppeteer-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
// A desktop's window and a phone's. The phone's is wider than the smallest that is sold, and narrower than most.
const WINDOWS = {
  desktop: { width: 1280, height: 900, deviceScaleFactor: 1 },
  phone: { width: 375, height: 812, deviceScaleFactor: 2, isMobile: true, hasTouch: true },
};
const COLOURS = ["light", "dark"];
// A picture is no longer than this; the page below has more events of the same kind.
const LONGEST = 3200;
const MOST_TABS = 600;
// What can be used.
const USED = 'a[href], button, select, [tabindex="0"]';
const [, , chromium, profile, pictures] = process.argv;

let browser = null;
let url = "";
const pages = {};
// What the page must not do: ask elsewhere, break its own rules, open a window of its own.
const faults = [];
// Requests that change something.
const changes = [];
// A change that is held back, until it is let go.
let held = null;
let holds = false;

const need = (isSo, why) => {
  if (!isSo) throw new Error(typeof why === "function" ? why() : why);
};

async function watch(page) {
  page.setDefaultTimeout(60_000);
  page.on("request", (request) => {
    const asked = new URL(request.url());
    if (asked.protocol !== "data:" && asked.origin !== new URL(url).origin) faults.push(`asks elsewhere: ${asked.href}`);
    if (request.method() !== "GET") changes.push(`${request.method()} ${asked.pathname}`);
  });
  page.on("dialog", async (dialog) => {
    faults.push(`a window of its own: ${dialog.message()}`);
    await dialog.dismiss();
  });
  page.on("pageerror", (error) => faults.push(`an error of its program: ${error.message}`));
  // Chromium names what the content security policy forbade here, and nowhere else.
  page.on("console", (message) => {
    if (/content security policy|trusted/i.test(message.text())) faults.push(`against its own rules: ${message.text()}`);
  });
  const session = await page.createCDPSession();
  session.on("Fetch.requestPaused", ({ requestId }) => {
    const go = () => session.send("Fetch.continueRequest", { requestId });
    if (holds) held = go;
    else go().catch((error) => faults.push(`a request that was held: ${error.message}`));
  });
  await session.send("Fetch.enable", { patterns: [{ urlPattern: "*/api/v1/vms/*" }] });
}

const until = (page, what, ...given) => page.waitForFunction(what, { polling: 50, timeout: 60_000 }, ...given);

const does = {
  async open(asked) {
    url = asked.url;
    browser = await puppeteer.launch({
      executablePath: chromium,
      userDataDir: profile,
      // Hosts of the lab are run by root, for whom Chromium has no sandbox; it sees this page alone.
      args: ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run", "--disable-background-networking"],
    });
    for (const [name, viewport] of Object.entries(WINDOWS)) {
      const page = await browser.newPage();
      pages[name] = page;
      await page.setViewport(viewport);
      await watch(page);
      await page.goto(url, { waitUntil: "domcontentloaded" });
    }
    return await browser.version();
  },

  // Until a place on the page says something, on both windows.
  async await({ css, says, patience_ms }) {
    for (const page of Object.values(pages)) {
      const there = (css, says) => [...document.querySelectorAll(css)].some((one) => one.textContent.includes(says));
      try {
        await page.waitForFunction(there, { polling: 50, timeout: patience_ms }, css, says);
      } catch {
        const shows = await page.evaluate((css) => [...document.querySelectorAll(css)].map((one) => one.textContent).join(" | "), css);
        throw new Error(`'${css}' does not say '${says}': ${shows || "there is none"}`);
      }
    }
  },

  // A picture of each window in each colour, and what axe-core finds in it.
  async shoot({ state }) {
    const [grave, light] = [[], []];
    for (const [name, page] of Object.entries(pages)) {
      await page.bringToFront();
      for (const colour of COLOURS) {
        await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: colour }]);
        const where = `${state}-${name}-${colour}`;
        const { width, height, hidden } = await page.evaluate(() => ({
          width: document.documentElement.scrollWidth,
          height: document.documentElement.scrollHeight,
          hidden: getComputedStyle(document.body).backgroundColor,
        }));
        need(width <= WINDOWS[name].width, `${where}: it is ${width} wide, and the window ${WINDOWS[name].width}`);
        need(hidden !== "rgba(0, 0, 0, 0)", `${where}: it has no style`);
        const clip = { x: 0, y: 0, width: WINDOWS[name].width, height: Math.min(height, LONGEST) };
        await page.screenshot({ path: join(pictures, `${where}.png`), clip, captureBeyondViewport: true });
        await page.evaluate(`${AXE}; 0`);
        const found = await page.evaluate(async () => {
          const { violations, passes } = await window.axe.run(document, { resultTypes: ["violations", "passes"] });
          return {
            passes: passes.length,
            violations: violations.map(({ id, impact, help, nodes }) => ({ id, impact, help, at: nodes.map((node) => node.target.join(" ")) })),
          };
        });
        need(found.passes >= 10, `${where}: axe-core looked at next to nothing`);
        for (const { id, impact, help, at } of found.violations) {
          const words = `${where}: ${impact}: ${help} (${id}) at ${at.slice(0, 3).join(", ")}`;
          (["serious", "critical"].includes(impact) ? grave : light).push(words);
        }
      }
    }
    need(grave.length === 0, () => grave.join("; "));
    return light;
  },

  // Everything that can be used has its turn with the tabulator, in the order in which it is seen, and shows that it has the focus.
  async tabs() {
    const page = await front("desktop");
    await page.evaluate((used) => {
      // The tabulator goes on from where it was, even when nothing has the focus any more.
      document.body.tabIndex = -1;
      document.body.focus();
      document.body.removeAttribute("tabindex");
      window.scrollTo(0, 0);
      document.querySelectorAll(used).forEach((one, at) => (one.dataset.turn = at));
    }, USED);
    const wanted = await page.evaluate((used) =>
      [...document.querySelectorAll(used)]
        .filter((one) => !one.disabled && !one.closest("dialog:not([open])") && one.getClientRects().length > 0)
        .map((one) => one.dataset.turn),
      USED,
    );
    const met = [];
    for (let turn = 0; turn < MOST_TABS; turn += 1) {
      await page.keyboard.press("Tab");
      const at = await page.evaluate(() => {
        const one = document.activeElement;
        if (!one?.dataset.turn) return null;
        const { outlineStyle, outlineWidth } = getComputedStyle(one);
        const { left, right, width, height } = one.getBoundingClientRect();
        return {
          turn: one.dataset.turn,
          name: one.getAttribute("aria-label") ?? one.textContent.trim(),
          seen: outlineStyle !== "none" && parseFloat(outlineWidth) >= 2 && right > 0 && left < innerWidth && width > 0 && height > 0,
        };
      });
      if (at === null || met.includes(at.turn)) {
        if (met.length) break;
        continue;
      }
      need(at.seen, `'${at.name}' has the focus, and nobody sees it`);
      met.push(at.turn);
    }
    need(wanted.length > 1 && met.join() === wanted.join(), `the tabulator comes to ${met.length} of ${wanted.length} places: ${met} of ${wanted}`);
    return met.length;
  },

  // By keyboard: a button asks a second time, and whoever leaves it has changed nothing.
  async leave({ vm, what }) {
    const page = await front("desktop");
    const before = changes.length;
    const button = await reach(page, vm, what);
    for (const leaves of ["Escape", "Enter"]) {
      await page.keyboard.press("Enter");
      await until(page, () => document.getElementById("ask").open);
      const asked = await page.evaluate(() => ({
        at: document.activeElement.id,
        title: document.getElementById("ask-title").textContent,
      }));
      need(asked.at === "ask-no", `the second question has the focus at '${asked.at}', and not where nothing happens`);
      need(asked.title.includes(vm), `the second question does not name ${vm}: ${asked.title}`);
      await page.keyboard.press(leaves);
      await until(page, () => !document.getElementById("ask").open);
      const back = await page.evaluate((button) => document.activeElement === button, button);
      need(back, "after the second question the focus is elsewhere");
    }
    need(changes.length === before, () => `nothing was agreed to, and ${changes.at(-1)} was asked`);
  },

  // What cannot be done now: the button can be reached, says why, and neither asks nor does anything.
  async cannot({ vm, what, says }) {
    const page = await front("desktop");
    const before = changes.length;
    const button = await reach(page, vm, what);
    need(await button.evaluate((one) => one.getAttribute("aria-disabled") === "true"), `'${what} ${vm}' could be pressed`);
    await page.keyboard.press("Enter");
    await until(page, (says) => document.getElementById("told").textContent.includes(says), says);
    need(await page.evaluate(() => !document.getElementById("ask").open), "it asks about what cannot be done");
    need(changes.length === before, () => `${changes.at(-1)} was asked`);
  },

  // By keyboard: the question, and yes. Says how it went: what the page tells then, or why not.
  async order({ vm, what, state }) {
    const page = await front("desktop");
    const before = changes.length;
    await reach(page, vm, what);
    await page.keyboard.press("Enter");
    await until(page, () => document.getElementById("ask").open);
    holds = true;
    for (let turn = 0; turn < 4; turn += 1) {
      if (await page.evaluate(() => document.activeElement.id === "ask-yes")) break;
      await page.keyboard.press("Tab");
    }
    need(await page.evaluate(() => document.activeElement.id === "ask-yes"), "the tabulator does not come to the second question's yes");
    need(changes.length === before, "it was asked before the second question was answered");
    // What was told before is not what comes of this.
    await page.evaluate(() => (document.getElementById("told").textContent = ""));
    await page.keyboard.press("Enter");
    await until(page, () => document.getElementById("ask-yes").disabled);
    const asks = `POST /api/v1/vms/${vm}/${what}`;
    for (let look = 0; look < 600 && held === null; look += 1) await new Promise((go) => setTimeout(go, 50));
    need(held !== null, `'${asks}' was not asked`);
    // What is disabled keeps the focus until the page is drawn again, and takes neither it nor a key then: it cannot be asked twice.
    await until(page, () => document.activeElement.id !== "ask-yes");
    const taken = await page.evaluate(() => {
      document.getElementById("ask-yes").focus();
      return document.activeElement.id === "ask-yes";
    });
    need(!taken, "while it is asked, its button takes the focus");
    await page.keyboard.press("Enter");
    await page.keyboard.press("Space");
    holds = false;
    await held();
    held = null;
    // Enter on "Leave it" or on nothing may have closed the question; how it went is told either way.
    await until(page, () => !document.getElementById("ask-yes").disabled || document.getElementById("told").textContent !== "");
    await until(page, () => document.getElementById("told").textContent !== "" || document.getElementById("ask-wrong").textContent !== "");
    const asked = changes.slice(before);
    need(asked.join() === asks, `asked was ${asked.join(", ")}, and not ${asks} once`);
    const said = await page.evaluate(() => ({
      told: document.getElementById("told").textContent,
      wrong: document.getElementById("ask-wrong").textContent,
      open: document.getElementById("ask").open,
      focus: document.activeElement.id,
    }));
    if (said.wrong) {
      need(said.open && said.focus === "ask-yes", `it was refused, and the focus is at '${said.focus}'`);
      if (state) await does.shoot({ state });
      await page.keyboard.press("Escape");
      await until(page, () => !document.getElementById("ask").open);
    }
    return said.wrong || said.told;
  },

  // Texts from outside are there as they were written, and nothing became of them.
  async harmless({ texts }) {
    for (const [name, page] of Object.entries(pages)) {
      for (const text of texts) {
        const there = (text) => [...document.querySelectorAll("#events .text")].filter((one) => one.textContent === text).length;
        need((await page.evaluate(there, text)) > 0, `${name}: no event says ${JSON.stringify(text)}`);
      }
      const made = await page.evaluate(() => ({
        ran: window.hostile,
        title: document.title,
        parts: [...document.querySelectorAll("#events :not(li, time, span, div, p)")].map((one) => one.outerHTML.slice(0, 80)),
        scripts: document.scripts.length,
      }));
      need(made.ran === undefined, `${name}: an event's text was executed`);
      need(made.parts.length === 0, `${name}: an event's text became a part of the page: ${made.parts[0]}`);
      need(made.scripts === 1, `${name}: the page has ${made.scripts} scripts`);
    }
  },

  async close() {
    await browser?.close();
    need(faults.length === 0, () => [...new Set(faults)].join("; "));
  },
};

async function front(name) {
  const page = pages[name];
  await page.bringToFront();
  return page;
}

// Tabs until that button of that VM has the focus.
async function reach(page, vm, what) {
  const find = (vm, what) => {
    const card = [...document.querySelectorAll(".vm")].find((one) => one.querySelector("h3").textContent === vm);
    return card?.querySelector(`button[data-do="${what}"]`);
  };
  await until(page, find, vm, what);
  const button = (await page.evaluateHandle(find, vm, what)).asElement();
  for (let turn = 0; turn < MOST_TABS; turn += 1) {
    if (await page.evaluate((button) => document.activeElement === button, button)) return button;
    await page.keyboard.press("Tab");
  }
  throw new Error(`the tabulator does not come to '${what}' of ${vm}`);
}

const oneLine = (error) => String(error?.message ?? error).replace(/\s+/g, " ").slice(0, 2000);

for await (const line of createInterface({ input: process.stdin })) {
  let answer;
  try {
    const asked = JSON.parse(line);
    need(Object.hasOwn(does, asked.do), `'${asked.do}' is nothing that is done here`);
    answer = { ok: true, said: (await does[asked.do](asked)) ?? null };
  } catch (error) {
    answer = { ok: false, why: oneLine(error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser?.close().catch(() => {});
