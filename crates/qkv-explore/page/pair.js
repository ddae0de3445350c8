// The panel that derives one weight: query and key, the contribution of each dimension, and the steps from score to
// weight. Opens on a cell and follows the chosen head.

import { fill, h, place, sized } from 'qkv/element';
import { plain, weight } from 'qkv/number';
import { at, headName, layerName, written } from 'qkv/run';
import { say } from 'qkv/say';
import { pairOf, tokensOf, weightsOf } from 'qkv/source';
import { choose } from 'qkv/state';
import { inks } from 'qkv/theme';

const height = 54;

/** A vector as bars around a zero line; hovering shows the value. */
function strip(title, values, point) {
  const canvas = h('canvas', { role: 'img', 'aria-label': `${title}: ${values.length} numbers from ${plain(Math.min(...values))} to ${plain(Math.max(...values))}` });
  const number = h('output', {});
  const element = h('div', { class: 'strip' }, h('div', {}, h('span', {}, title), number), canvas);
  const most = values.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-12);
  const bar = () => canvas.parentElement.clientWidth / values.length;
  function draw(marked = null) {
    const width = element.clientWidth;
    const context = sized(canvas, width, height);
    const ink = inks();
    const each = width / values.length;
    values.forEach((value, i) => {
      const long = (Math.abs(value) / most) * (height / 2 - 1);
      context.fillStyle = marked === i ? ink.text : ink.accent;
      context.globalAlpha = marked === i ? 1 : value < 0 ? 0.4 : 0.9;
      context.fillRect(i * each, value < 0 ? height / 2 : height / 2 - long, Math.max(0.5, each - (each > 3 ? 1 : 0)), Math.max(0.5, long));
    });
    context.globalAlpha = 1;
    context.fillStyle = ink.line;
    context.fillRect(0, height / 2, width, 1);
    number.textContent = marked === null ? '' : `${marked}: ${plain(values[marked])}`;
  }
  canvas.addEventListener('pointermove', (event) => point(Math.min(values.length - 1, Math.max(0, Math.floor(event.offsetX / bar())))));
  canvas.addEventListener('pointerleave', () => point(null));
  return { element, draw };
}

function ledger(terms) {
  return h('ol', { class: 'ledger' }, terms.map(({ name, formula, value }, i) => h('li', { class: i === terms.length - 1 ? 'end' : '' },
    h('span', {}, name), h('code', {}, formula), h('b', {}, typeof value === 'number' ? (i === terms.length - 1 ? weight(value) : plain(value)) : String(value ?? '–')))));
}

let shown = null;
let opener = null;
let redraw = () => {};

const close = () => choose({ cell: null });

/** Opens, updates or closes the panel. */
export async function showPair(run, state) {
  const sheet = place('pair');
  const open = Boolean(state.cell) && run.can.pair;
  const fresh = sheet.hidden || sheet.contains(document.activeElement);
  if (open && sheet.hidden) opener = document.activeElement;
  if (!open) {
    const inside = sheet.contains(document.activeElement) && !sheet.hidden;
    sheet.hidden = true;
    shown = null;
    if (inside) opener?.focus?.(); // back to where the user came from
    return;
  }
  const { index, layer, head } = at(run, state);
  const [query, key] = state.cell;
  if (query >= layer.n || key >= layer.m) { choose({ cell: null }); return; }
  const name = `${run.id}/${index}/${head}/${query}/${key}`;
  if (shown === name) return;
  shown = name;
  try {
    const one = head === 'mean' ? await strongest(run, index, query, key) : head;
    const [[from], [to], pair] = await Promise.all([tokensOf(run, layer.queries, query, query + 1), tokensOf(run, layer.keys, key, key + 1), pairOf(run, index, one, query, key)]);
    if (shown !== name) return;
    draw(sheet, { layer, head, one, query, key, from: written(from), to: written(to), pair });
  } catch (error) {
    if (shown === name) fill(sheet, closer(), h('p', { class: 'refusal' }, error.message));
  }
  sheet.hidden = false;
  if (fresh) sheet.querySelector('h2')?.focus({ preventScroll: false });
}

/** The head with the largest weight for this pair: the mean has no vectors. */
async function strongest(run, index, query, key) {
  const { heads, m } = run.layers[index];
  const all = await Promise.all(Array.from({ length: heads }, (_, head) => weightsOf(run, index, head)));
  const values = all.map((weights) => weights[query * m + key]);
  return values.indexOf(Math.max(...values));
}

const closer = () => h('button', { type: 'button', class: 'close', 'aria-label': 'Close', onclick: close }, '×');

function draw(sheet, { layer, head, one, query, key, from, to, pair }) {
  const strips = [];
  const point = (i) => strips.forEach((each) => each.draw(i));
  strips.push(strip(`q of “${from}”`, pair.q, point), strip(`k of “${to}”`, pair.k, point), strip(pair.parts.name, pair.parts.values, point));
  sheet.hidden = false;
  fill(sheet, closer(),
    h('h2', { tabIndex: -1 }, 'Derivation of this weight'),
    h('p', { class: 'pairline' }, h('b', {}, from), h('span', { class: 'quiet' }, ' attends to '), h('b', {}, to), h('span', { class: 'result' }, weight(pair.weight))),
    h('p', { class: 'quiet' }, `${layerName(layer)}, ${headName(layer, one)} · query ${query}, key ${key}`,
      head === 'mean' ? h('span', {}, ' · the head with the largest weight for this pair') : null),
    strips.map(({ element }) => element),
    ledger(pair.terms));
  redraw = () => point(null);
  redraw();
  say(`${from} attends to ${to}: weight ${weight(pair.weight)}, from ${pair.terms.map(({ name, value }) => `${name} ${typeof value === 'number' ? plain(value) : value}`).join(', ')}`);
}

window.addEventListener('resize', () => redraw());
