// Looks at one page as a reader with a small or large screen, light or dark, would: node
// tests/port/browser.mjs MODULES SHOTS PAGE WIDTH SCHEME [SCENARIO]
//   MODULES   the folder whose node_modules hold playwright-core and axe-core
//             (tests/port/browser.sh makes it)
//   SHOTS     the folder for screenshots, NAME-WIDTH-SCHEME.png
//   PAGE      an .html file, or an .svg file, which is shown inside an empty page
//   WIDTH     of the window in pixels; SCHEME: light or dark
//   SCENARIO  a module whose default export works the page: async ({ page, width, scheme, check,
//             audit, shot }) => ...
// Prints "ok: ..." and "failed: PAGE WIDTH SCHEME RULE: what and where"; the last line is "N
// passed, N failed".
import { readFile, mkdtemp, rm } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const [modules, shots, file, widthText, scheme, scenario] = process.argv.slice(2);
const width = Number(widthText), height = width < 600 ? 800 : 900;
const require = createRequire(path.resolve(modules, 'node_modules') + path.sep);
const { chromium } = require('playwright-core');
// Ends what hangs, and nothing that a busy machine only slows down: ten minutes.
const LONG = 600000;
const name = path.basename(file).replace(/\.[^.]*$/, '');

let passed = 0, failed = 0;

function check(rule, good, detail = '') {
    if (good) passed++;
    else failed++;
    const more = good || !detail ? '' : `: ${detail}`;
    console.log(`${good ? 'ok' : 'failed'}: ${path.basename(file)} ${width} ${scheme} ${rule}${more}`);
    return good;
}

// One failure for each offence, or one "ok" when there is none.
function none(rule, offences) {
    if (offences.length === 0) check(rule, true);
    for (const offence of offences) check(rule, false, offence);
}

// ---- what is read inside the page ----

// Elements that reach beyond the window, where the document can be scrolled sideways.
function overflowing() {
    const root = document.scrollingElement ?? document.documentElement;
    if (root.scrollWidth <= window.innerWidth) return [];
    const inBox = (e) => e.parentElement && (getComputedStyle(e.parentElement).overflowX !== 'visible'
        && e.parentElement !== document.body || inBox(e.parentElement));
    const wide = [...document.body.querySelectorAll('*')].filter(
        (e) => e.getBoundingClientRect().right > window.innerWidth + 0.5 && !inBox(e));
    return [`the document is ${root.scrollWidth} px wide in a window of ${window.innerWidth}: ` +
        wide.slice(0, 4).map((e) => {
            const classes = e.classList.length ? ` class=${[...e.classList].join('.')}` : '';
            return `<${e.localName}${e.id ? ` id=${e.id}` : ''}${classes}>`;
        }).join(' ')];
}

// Pictures without words, whichever way they are drawn.
function wordless() {
    const words = (e) => {
        const by = (e.getAttribute('aria-labelledby') ?? '').split(/\s+/).filter(Boolean)
            .map((id) => document.getElementById(id)?.textContent ?? '').join(' ');
        const title = [...e.children].find((c) => c.localName === 'title');
        return by.trim() || e.getAttribute('aria-label') || e.getAttribute('alt') || title?.textContent || '';
    };
    const offences = [];
    for (const e of document.querySelectorAll('img, svg, canvas')) {
        const role = e.getAttribute('role') ?? '';
        if (e.parentElement?.closest('svg') || e.closest('[aria-hidden="true"]') || role === 'presentation'
            || role === 'none') continue;
        if (e.localName === 'img' && e.getAttribute('alt') === '') continue; // says that it is decoration
        if (/\p{L}{2}/u.test(words(e))) continue;
        offences.push(`${e.outerHTML.slice(0, 120).replace(/\s+/g, ' ')} has no text alternative`);
    }
    return offences;
}

// Text in SVG against what is painted below it, which axe-core does not check. Ratios of WCAG 2:
// 4.5, large text 3.
function faintSvgText() {
    const parse = (text) => {
        const m = /^rgba?\(([^)]*)\)$/.exec(text);
        const v = m ? m[1].split(/[\s,/]+/).map(Number) : [0, 0, 0, 0];
        return [v[0], v[1], v[2], v.length > 3 ? v[3] : 1];
    };
    const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3])).concat(1);
    const light = (c) => {
        const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const opacity = (e) => e ? Number(getComputedStyle(e).opacity) * opacity(e.parentElement) : 1;
    const dark = matchMedia('(prefers-color-scheme: dark)').matches
        && /dark/.test(getComputedStyle(document.documentElement).colorScheme);
    const paint = (e) => { // what an element covers a point with
        const style = getComputedStyle(e);
        const shape = e instanceof SVGGraphicsElement && !(e instanceof SVGSVGElement);
        if (shape && style.fill.startsWith('url(')) return null;
        const c = shape && style.fill !== 'none' ? parse(style.fill) : shape ? [0, 0, 0,
            0] : parse(style.backgroundColor);
        c[3] *= (shape ? Number(style.fillOpacity) : 1) * opacity(e);
        return c;
    };
    const offences = [];
    for (const text of document.querySelectorAll('svg text, svg tspan')) {
        const own = [...text.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join('').trim();
        const style = getComputedStyle(text);
        if (own === '' || text.closest('[aria-hidden="true"]') && !text.closest('svg[role="img"]')
            || style.visibility === 'hidden') continue;
        text.scrollIntoView({ block: 'center', inline: 'center' });
        const box = text.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
        if (box.width === 0) continue;
        const stack = document.elementsFromPoint(x, y).filter((e) => e !== text && !text.contains(e)
            && !e.contains(text) || e.contains(text) && !(e instanceof SVGTextContentElement));
        const below = stack.filter((e) => !(e instanceof SVGTextContentElement)).map(paint);
        if (below.includes(null)) continue; // a gradient
        const ground = below.reduceRight((b, c) => over(c, b), dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
        const ink = parse(style.fill);
        ink[3] *= Number(style.fillOpacity) * opacity(text);
        const [a, b] = [light(over(ink, ground)), light(ground)].sort((p, q) => q - p), ratio = (a + 0.05) / (b + 0.05);
        const scale = text.getScreenCTM()?.a ?? 1, size = parseFloat(style.fontSize) * scale;
        const least = size >= 24 || size >= 18.66 && Number(style.fontWeight) >= 700 ? 3 : 4.5;
        if (ratio < least) offences.push(`"${own.slice(0, 40)}" has a contrast of ${ratio.toFixed(2)}, not ${least}`);
    }
    window.scrollTo(0, 0);
    return offences;
}

// ---- the page ----

const errors = [], requests = [];

function listen(page) {
    page.on('console', (message) => message.type() === 'error' && errors.push(message.text()));
    page.on('pageerror', (error) => errors.push(String(error)));
    page.on('request', (request) => /^(file|data|blob|about):/.test(request.url()) || requests.push(request.url()));
    page.on('websocket', (socket) => requests.push(socket.url()));
}

async function open(page) {
    if (!file.endsWith('.svg')) return page.goto(pathToFileURL(path.resolve(file)).href, { waitUntil: 'load' });
    const picture = (await readFile(file, 'utf8')).replace(/^\s*<\?xml[^>]*>/, '');
    return page.setContent(`<!doctype html><html lang="en"><meta name="viewport" content="width=device-width">` +
        `<title>${name}</title><style>:root { color-scheme: light dark; background: #fff; color: #111 } ` +
        `svg { max-width: 100%; height: auto }\n` +
        `@media (prefers-color-scheme: dark) { :root { background: #111; color: #eee } }</style>` +
        `<main><h1>${name}</h1>${picture}</main></html>`);
}

// All rules on the page as it is now. label: what has been done to it.
async function audit(page, axe, label) {
    const rule = (what) => label ? `${label}/${what}` : what;
    if (!await page.evaluate(() => 'axe' in window)) await page.evaluate(axe);
    none(rule('overflow'), await page.evaluate(overflowing));
    none(rule('text-alternative'), await page.evaluate(wordless));
    none(rule('svg-contrast'), await page.evaluate(faintSvgText));
    const found = await page.evaluate(async () => {
        const results = await window.axe.run(document, { resultTypes: ['violations', 'incomplete'] });
        for (const v of results.incomplete)
            v.nodes = v.nodes.filter((node) => !document.querySelector(node.target[0])?.closest('svg'));
        // What is scrolled out of sight in a box of its own is looked at with the box open and room
        // for it.
        const boxes = [...document.querySelectorAll('[tabindex="0"]')].filter((e) => e.scrollWidth > e.clientWidth
            || e.scrollHeight > e.clientHeight);
        const style = document.documentElement.style;
        if (boxes.length > 0) style.minWidth = '4000px';
        for (const box of boxes) box.style.overflow = 'visible';
        const open = boxes.length > 0 ? await window.axe.run(document,
            { runOnly: ['color-contrast'], resultTypes: ['violations', 'incomplete'] }) : null;
        for (const box of boxes) box.style.overflow = '';
        style.minWidth = '';
        const inBox = (node) => boxes.some((box) => box.contains(document.querySelector(node.target[0])));
        if (open)
            for (const v of results.incomplete.filter((i) => i.id === 'color-contrast'))
                v.nodes = v.nodes.filter((node) => !inBox(node));
        if (open) for (const kind of ['violations', 'incomplete'])
            for (const v of open[kind]) results[kind].push({ ...v,
                nodes: v.nodes.filter((node) => inBox(node)
                && !document.querySelector(node.target[0])?.closest('svg')) });
        return results;
    });
    const offences = found.violations.flatMap((v) => v.nodes.map((node) =>
        ({ id: v.id, text: [node.target.join(' '), node.html.slice(0, 120).replace(/\s+/g, ' '),
            (node.failureSummary ?? v.help).split('\n').slice(-1)[0].trim()].join(': ') })));
    for (const v of found.incomplete.filter((i) => i.id === 'color-contrast'))
        for (const node of v.nodes.filter((n) => !n.any.some((a) => a.data?.messageKey === 'shortTextContent')))
            offences.push({ id: v.id, text: `${node.target.join(' ')}: the contrast cannot be told: ` +
                node.any.map((a) => a.data?.messageKey ?? a.message).join(' ') });
    for (const { id, text } of offences) check(rule(id), false, text);
    check(rule('axe'), offences.length === 0 && found.passes.length > 0,
        found.passes.length > 0 ? `${offences.length} above` : 'no rule applied');
    return offences.length;
}

const profile = await mkdtemp(path.join(tmpdir(), 'moe-browser-'));
const browser = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
        '--disable-component-update', '--disable-sync'],
    viewport: { width, height }, colorScheme: scheme, isMobile: false, hasTouch: width < 600, timeout: LONG,
});
try {
    const page = browser.pages()[0] ?? await browser.newPage();
    page.setDefaultTimeout(LONG);
    await page.route(/^(https?|wss?|ftp):/, (route) => route.abort());
    listen(page);
    await open(page);
    const axe = await readFile(require.resolve('axe-core/axe.min.js'), 'utf8');
    const shot = async (label) => page.screenshot({
        path: path.join(shots, `${name}-${width}-${scheme}${label ? `-${label}` : ''}.png`), fullPage: true });
    check('shows-words', await page.evaluate(() => (document.body?.innerText ?? '').trim().length > 0
        || document.querySelector('svg') !== null), 'the page is empty');
    await audit(page, axe, '');
    await shot('');
    if (scenario) {
        const { default: work } = await import(pathToFileURL(path.resolve(scenario)).href);
        await work({ page, width, scheme, check, audit: (label) => audit(page, axe, label), shot });
    }
    none('console', errors);
    none('network', requests.map((url) => `asks for ${url}`));
} catch (error) {
    check('works', false,
        String(error.stack ?? error).split('\n').filter((line) => !/^\S*\s+- |×/.test(line)).join('\n'));
} finally {
    await browser.close();
    await rm(profile, { recursive: true, force: true, maxRetries: 5 });
}
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed > 0 || passed === 0 ? 1 : 0;
