// Works the page of examples/web as a person would; a scenario of tests/port/browser.mjs.
import { readFile } from 'node:fs/promises';

const number = async (page, id) => Number.parseFloat(await page.locator(`#${id}`).textContent());

// Trains by the buttons, then on to just so many steps, however many frames a second there are;
// returns how many percent of the points the page calls right.
async function trainTo(page, steps) {
    await page.getByRole('button', { name: 'Train' }).click();
    await page.waitForFunction(() => Number(document.getElementById('steps').textContent) > 0);
    await page.getByRole('button', { name: 'Pause' }).click();
    await page.waitForFunction('!waiting');
    await page.evaluate((last) => {
        while (numbers()[STEPS] < last) good('web_train', count, 1);
        measure(true);
        dirty = true;
        wake();
    }, steps);
    return await number(page, 'steps') === steps ? number(page, 'accuracy') : NaN;
}

const shares = (page) => page.locator('#loads .share').allTextContents();

async function chooseRouter(page, name) {
    const value = await page.locator('#router option').evaluateAll(
        (options, wanted) => options.find((o) => o.textContent.startsWith(`${wanted} `))?.value, name);
    await page.locator('#router').selectOption(value);
}

async function addUp(page, check, rule) {
    const words = await shares(page), sum = words.reduce((a, w) => a + Number.parseFloat(w), 0);
    check(rule, words.length > 1 && Math.abs(sum - 100) < 0.05, `${words.join(' ')} make ${sum}`);
}

// What the page says of its points against its map, which other calls made: answers and first
// experts at the places of the points. After a pause the next frame brings the numbers up to date.
async function agrees(page, check) {
    await page.waitForFunction('!dirty && !waiting');
    const seen = await page.evaluate(() => {
        const cells = side * side, first = view(Uint8Array, library.web_map_first(), cells);
        const answer = view(Uint8Array, library.web_map_class(), cells);
        const at = points(), of = labels(), tally = Array(experts()).fill(0);
        let good = 0;
        for (let i = 0; i < count; i++) {
            const cell = Math.floor((1 - at[2 * i + 1]) / 2 * side) * side + Math.floor((at[2 * i] + 1) / 2 * side);
            good += answer[cell] === of[i], tally[first[cell]]++;
        }
        return { good: 100 * good / count, loads: tally.map((t) => 100 * t / count), count };
    });
    const said = await number(page, 'accuracy'), loads = (await shares(page)).map(Number.parseFloat);
    check('map-agrees-on-classes', seen.count === 400 && Math.abs(seen.good - said) < 3,
        `${seen.good} % by the map, ${said} % by the page`);
    check('map-agrees-on-loads', loads.every((l, e) => Math.abs(l - seen.loads[e]) < 3),
        `${seen.loads} by the map, ${loads} by the page`);
}

export default async ({ page, width, scheme, check, audit, shot }) => {
    check('kernels', /kernels: wasm \(128-bit SIMD\)/.test(await page.locator('#kernels').textContent()),
        await page.locator('#kernels').textContent());

    // An example and a router learn, the numbers move.
    await page.getByRole('button', { name: 'blobs' }).click();
    await chooseRouter(page, 'smoe');
    const before = await number(page, 'loss'), untrained = await number(page, 'accuracy');
    check('knows-nothing', untrained < 80, `${untrained} % before training`);
    const right = await trainTo(page, 300);
    check('learns', right >= 90 && await number(page, 'steps') > 0, `${right} %`);
    check('loss-falls', await number(page, 'loss') < before, `${before} -> ${await number(page, 'loss')}`);
    await addUp(page, check, 'loads-add-up');
    for (const id of ['value-hb', 'value-he', 'value-iey']) {
        const value = await number(page, id);
        check(id, value >= 0 && value <= Math.log(6) + 0.001, String(value));
    }
    check('curves', await page.locator('#charts polyline').evaluateAll(
        (lines) => lines.every((l) => l.points.length > 2)));
    check('formula', (await page.locator('#formula').textContent()) === 'w = softmax over the top K logits');

    // Another router, seen by class.
    await page.getByRole('button', { name: 'two moons' }).click();
    await page.locator('#top_k').selectOption('1');
    await chooseRouter(page, 'grok1'); // nothing is dropped, whatever else is in the call
    check('new-net', await number(page, 'steps') === 0);
    check('learns-moons', await trainTo(page, 600) >= 95);
    await addUp(page, check, 'loads-of-another');
    await agrees(page, check);
    await shot('expert');
    await page.getByRole('radio', { name: 'predicted class' }).check();
    await audit('class');
    await shot('class');
    await page.locator('#loads button').nth(0).click();
    check('one-expert', await page.locator('#loads button').nth(0).getAttribute('aria-pressed') === 'true'
        && /where expert 1 works/.test(await page.locator('#summary').textContent()));
    await page.getByRole('radio', { name: 'expert', exact: true }).check();

    // The same seed gives the same steps, another one others.
    const after = async (steps) => {
        await page.getByRole('button', { name: 'Reset' }).click();
        for (let i = 0; i < steps; i++) await page.getByRole('button', { name: 'Step' }).click();
        return page.locator('#loss').textContent();
    };
    const once = await after(5);
    check('same-seed', await after(5) === once, `${once} and ${await after(5)}`);
    check('stepped', await number(page, 'steps') === 5);
    await page.locator('#seed').fill('2');
    check('other-seed', await after(5) !== once, once);

    // The picture can be kept.
    const [kept] = await Promise.all([page.waitForEvent('download'),
        page.getByRole('button', { name: 'Save the picture' }).click()]);
    const bytes = await readFile(await kept.path());
    check('picture', kept.suggestedFilename() === 'mixture.png' && bytes.length > 5000
        && bytes.toString('latin1', 1, 4) === 'PNG', `${bytes.length} bytes`);

    // Points by mouse and by keys, and away again.
    await page.getByRole('button', { name: 'clear' }).click();
    check('empty', /empty/.test(await page.locator('#summary').textContent()));
    const plane = page.locator('#plane');
    await plane.evaluate((e) => e.scrollIntoView({ block: 'center' }));
    const box = await plane.boundingBox(), at = (x, y) => [box.x + x * box.width, box.y + y * box.height];
    await plane.focus();
    for (const key of ['Alt+Enter', 'Enter']) await page.keyboard.press(key); // the first is the browser's
    check('one-point', /^1 point in 1 class\./.test(await page.locator('#summary').textContent()),
        await page.locator('#summary').textContent());
    await page.keyboard.press('Delete');
    for (const [pen, x] of [['1', 0.25], ['2', 0.75]]) {
        await page.getByRole('radio', { name: pen, exact: true }).check();
        await page.mouse.move(...at(x, 0.2));
        await page.mouse.down();
        await page.mouse.move(...at(x, 0.8), { steps: 20 });
        await page.mouse.up();
    }
    const drawn = await number(page, 'summary');
    check('drawn', drawn >= 20 && /in 2 classes/.test(await page.locator('#summary').textContent()),
        await page.locator('#summary').textContent());
    await plane.focus();
    for (const key of ['ArrowLeft', 'ArrowUp', 'Enter']) await page.keyboard.press(key);
    check('by-keys', await number(page, 'summary') === drawn + 1, await page.locator('#summary').textContent());
    await page.keyboard.press('Delete');
    check('taken-away', await number(page, 'summary') === drawn, await page.locator('#summary').textContent());
    if (width < 600) {
        await page.touchscreen.tap(...at(0.5, 0.1));
        check('by-touch', await number(page, 'summary') === drawn + 1, await page.locator('#summary').textContent());
        await page.getByRole('radio', { name: 'erase' }).check();
        await page.touchscreen.tap(...at(0.5, 0.1));
        check('erased', await number(page, 'summary') === drawn, await page.locator('#summary').textContent());
    }
    check('learns-drawn', await trainTo(page, 300) >= 98);
    await shot('drawn');

    // There is an end to the room for points.
    await page.evaluate(() => {
        count = library.web_data(0, most, 1);
        put(0, 0);
        changed();
    });
    check('full', /^4000 points \(there is no room for more\) in /.test(await page.locator('#summary').textContent()),
        await page.locator('#summary').textContent());

    // An error stays while other calls succeed, until its own does.
    for (const fails of [true, false]) {
        await page.evaluate((on) => {
            window.whole ??= library;
            library = on ? { ...library, web_train: () => 1, web_error: library.web_version } : window.whole;
        }, fails);
        await page.getByRole('button', { name: 'Step' }).click();
        await page.waitForFunction('!dirty && !waiting');
        check(fails ? 'error-stays' : 'error-gone', (await page.locator('#error').textContent() !== '') === fails);
    }

    // What the library refuses is said in its words.
    await page.locator('#experts').selectOption('2');
    await page.getByRole('button', { name: 'Step' }).click();
    await page.locator('#top_k').selectOption('4');
    check('refusal-at-0', await number(page, 'steps') === 0);
    check('refusal', /top_k = 4: must be at most n_experts = 2/.test(await page.locator('#error').textContent()),
        await page.locator('#error').textContent());
    check('no-start', await page.locator('#start').isDisabled());
    await audit('refused');
    await page.locator('#top_k').selectOption('0');
    check('refusal-gone', await page.locator('#error').textContent() === ''
        && !await page.locator('#start').isDisabled());
    await page.locator('#refused-count').click();
    check('reasons', await page.locator('#refused li').count() > 5
        && /needs_attention/.test(await page.locator('#refused').textContent()));

    // Every router that is offered trains and is shown.
    await page.locator('#experts').selectOption('8');
    await page.getByRole('button', { name: 'blobs' }).click();
    const offered = width > 600 && scheme === 'light' ? await page.locator('#router option:not([disabled])')
        .evaluateAll((o) => o.map((e) => [e.value, e.textContent])) : [];
    for (const [value, name] of offered) {
        await page.locator('#router').selectOption(value);
        await page.getByRole('button', { name: 'Train' }).click();
        await page.waitForFunction(() => Number(document.getElementById('steps').textContent) >= 20
            || document.getElementById('error').textContent !== '');
        await page.getByRole('button', { name: /Pause|Train/ }).click();
        await page.waitForFunction(() => document.getElementById('start').textContent === 'Train');
        check(`router ${name}`, await page.locator('#error').textContent() === '',
            await page.locator('#error').textContent());
        await addUp(page, check, `loads of ${name}`);
    }
    check('routers', offered.length === 0 || offered.length >= 20, String(offered.length));

    // The oldest browsers with SIMD know less of other things.
    await page.addInitScript(() => { delete CanvasRenderingContext2D.prototype.roundRect; });
    await page.reload();
    await page.waitForFunction('made && !dirty && !waiting');
    check('numbers-of-experts', await page.evaluate('places.length') > 0);

    // A browser without SIMD is told so.
    await page.addInitScript(() => { WebAssembly.validate = () => false; });
    await page.reload();
    await page.locator('#unsupported').waitFor();
    check('unsupported', /no WebAssembly with SIMD/.test(await page.locator('#unsupported').textContent())
        && !await page.locator('#plane').isVisible());
    await audit('unsupported');
};
