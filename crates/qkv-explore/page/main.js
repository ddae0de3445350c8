// Wires the page: reads the state, opens the run, passes both to everything that draws, and registers the views.

import { go, showCaption } from 'qkv/caption';
import { buildDisplay, showDisplay } from 'qkv/display';
import { documentView } from 'qkv/document';
import { fill, h, place, rove } from 'qkv/element';
import { exporter } from 'qkv/export';
import { Grid, grid } from 'qkv/grid';
import { heatmap } from 'qkv/heatmap';
import { imageView } from 'qkv/image';
import { addKey, toggleHelp } from 'qkv/keys';
import { lines } from 'qkv/lines';
import { map } from 'qkv/map';
import { showPair } from 'qkv/pair';
import { Pane } from 'qkv/pane';
import { Prompt } from 'qkv/prompt';
import { rollout } from 'qkv/rollout';
import { at, fits, headsIn } from 'qkv/run';
import { soundView } from 'qkv/sound';
import { ask, first, source } from 'qkv/source';
import { chosen, choose, onChoice } from 'qkv/state';
import { buildSteps, showSteps, togglePlay } from 'qkv/steps';
import { table } from 'qkv/table';
import { dress, onSystemTheme, theme } from 'qkv/theme';
import { addView, firstView, tabs, viewFor } from 'qkv/views';

for (const view of [documentView, imageView, soundView, heatmap, map, lines, grid, rollout, table]) addView(view);

let run = null; // the run on display
let other = null; // the run it is compared with
const panes = { a: null, b: null };
let heads = null;
const prompts = { a: new Prompt(h('div', { class: 'line' }), 'a'), b: new Prompt(h('div', { class: 'line second' }), 'b') };

// ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

/** The run of a model and a text. The first one is part of the page; a model without text input has its own run. */
async function find(model, text, target) {
  const request = { model: model ?? first.run.model, text: text ?? first.run.text };
  if (!target && request.model === first.run.model && request.text === first.run.text) return first.run;
  const known = (first.models ?? []).find(({ id }) => id === request.model);
  if (known && !known.takes_text && known.run !== undefined) return source.run(known.run);
  return ask(request.model, request.text, target);
}

const same = (a, b, names) => names.every((name) => a[name] === b[name]);

async function openRun(state) {
  prompts.a.waits(true);
  try {
    const found = await find(state.model, state.text, state.target);
    if (!same(state, chosen(), ['model', 'text', 'target'])) return;
    prompts.a.waits(false);
    setRun(found);
  } catch (error) {
    if (!run) setRun(first.run);
    prompts.a.refuse(error);
  }
}

function setRun(found) {
  run = found;
  panes.a?.close();
  panes.a = new Pane(place('panes'), run, 'a');
  if (panes.b) place('panes').append(panes.b.element);
  heads = new Grid(place('heads'), run, { largest: 44, goesTo: () => (['heatmap', 'lines', 'image', 'sound'].includes(settled(chosen()).view) ? {} : { view: 'heatmap' }) });
  buildSteps(run);
  showAll(chosen());
}

const compares = (state) => state.text2 !== null || state.model2 !== null;

async function openOther(state) {
  if (!compares(state)) {
    panes.b?.close();
    [panes.b, other] = [null, null];
    prompts.b.host.remove();
    document.body.classList.remove('two');
    return;
  }
  document.body.classList.add('two');
  place('prompt').append(prompts.b.host);
  prompts.b.waits(true);
  try {
    const found = await find(state.model2 ?? state.model, state.text2 ?? state.text, null);
    if (!same(state, chosen(), ['model2', 'text2'])) return;
    prompts.b.waits(false);
    other = found;
    panes.b?.close();
    panes.b = new Pane(place('panes'), other, 'b');
    showAll(chosen());
  } catch (error) {
    prompts.b.refuse(error);
  }
}

/** Whether there is a model to compare with. */
const comparable = !first.standalone && (first.models ?? []).length > 0;

function toggleCompare() {
  if (compares(chosen())) { choose({ text2: null, model2: null }, { push: true }); return; }
  const models = first.models ?? [];
  const next = models.find(({ id }) => id !== run.model) ?? models[0];
  const example = (first.examples ?? []).find((text) => text !== run.text) ?? run.text;
  const text = next.takes_text ? (next.id !== run.model && run.text) || example : ''; // a different model reads the same text, the same model a different one
  choose({ model2: next.id, text2: text }, { push: true });
  place('text2')?.focus();
}

// ── rendering ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

const tabBar = place('tabs');

function buildTabs() {
  const buttons = tabs().map(({ tab }) => h('button', { type: 'button', role: 'tab', id: `tab-${tab}`, 'aria-controls': 'panes', onclick: () => choose({ view: tab }, { push: true }) }));
  fill(tabBar, buttons);
  tabBar.addEventListener('keydown', (event) => rove(event, buttons.filter((button) => !button.hidden)));
}

function showTabs(state) {
  const { layer } = at(run, state);
  for (const { tab } of tabs()) {
    const view = viewFor(tab, run, layer);
    const button = place(`tab-${tab}`);
    button.hidden = !view;
    button.textContent = view?.name ?? '';
    button.title = view?.hint ?? '';
    const on = state.view === tab;
    button.setAttribute('aria-selected', String(on));
    button.tabIndex = on ? 0 : -1;
  }
}

/** The layer of the other run with the same group and index; null if there is none. */
function twin(state) {
  const { layer } = at(run, state);
  const found = other.layers.findIndex(({ group, index }) => group === layer.group && index === layer.index);
  return found < 0 ? null : found;
}

/** The caption of a pane in a comparison: the model if they differ, text, output. */
function captionOf(which) {
  const name = (first.models ?? []).find(({ id }) => id === which.model)?.name;
  const words = [which.text, which.output].filter(Boolean).join(' → ');
  return run.model !== other.model || !words ? [name, words].filter(Boolean).join(' · ') : words;
}

/** The chosen state with open choices decided: documents, images and sounds open in their own view; long inputs get a log scale, because
    they look nearly empty on a linear one. */
function settled(request) {
  const state = { ...request, view: request.view ?? firstView(run, at(run, request).layer) };
  return { ...state, scale: state.scale ?? (fits(at(run, state).layer) || ['lines', 'document', 'image', 'sound'].includes(state.view) ? 'linear' : 'log') };
}

function showAll(request, before = null) {
  if (!run) return;
  const state = settled(request);
  document.body.dataset.view = state.view;
  document.title = run.text ? `${run.text} · qkv explore` : 'qkv explore';
  place('theme').textContent = theme() === 'dark' ? 'Light' : 'Dark';
  prompts.a.show(run, state);
  if (other) prompts.b.show(other, state);
  showTabs(state);
  showCaption(run, state);
  showDisplay(run, state);
  showSteps(state, before);
  heads.show(state).catch((error) => panes.a.refuse(error));
  panes.a.name(panes.b ? captionOf(run) : null);
  panes.a.show(state);
  if (panes.b) {
    panes.b.name(captionOf(other));
    panes.b.show({ ...state, layer: twin(state) });
  }
  showPair(run, state);
}

// ── buttons and shortcuts ──────────────────────────────────────────────────────────────────────────────────────────────────

function buildTools() {
  const flip = () => choose({ theme: theme() === 'dark' ? 'light' : 'dark' });
  const tool = (text, title, act, id) => h('button', { type: 'button', title, onclick: act, id }, text);
  fill(place('tools'),
    !comparable ? null : tool('Compare', 'two models or two sentences side by side (c)', toggleCompare, 'compare'),
    exporter(() => panes.a, () => settled(chosen())),
    tool('Dark', 'light or dark theme (d)', flip, 'theme'),
    tool('Keys', 'keyboard shortcuts (?)', toggleHelp, 'keys'));
  const model = (first.models ?? []).find(({ id }) => id === first.run.model);
  place('model').textContent = first.standalone ? 'standalone file' : model?.note ?? model?.name ?? '';
  addKey(['ArrowUp'], '↑ ↓', 'previous, next layer', () => go(run, -1, 0));
  addKey(['ArrowDown'], '', '', () => go(run, 1, 0));
  addKey(['ArrowLeft'], '← →', 'previous, next head', () => go(run, 0, -1));
  addKey(['ArrowRight'], '', '', () => go(run, 0, 1));
  const nth = (i) => () => { // the visible tabs: not every run has all of them
    const view = tabs().filter(({ tab }) => viewFor(tab, run, at(run, chosen()).layer))[i];
    if (view) choose({ view: view.tab }, { push: true });
  };
  tabs().forEach((_, i) => addKey([String(i + 1)], i ? '' : `1 … ${tabs().length}`, i ? '' : 'views, in tab order', nth(i)));
  addKey(['m'], 'm', 'mean of the heads', () => {
    if (headsIn(at(run, chosen()).layer).includes('mean')) choose({ head: 'mean' });
  });
  addKey(['+', '='], '+ −', 'zoom the map', () => panes.a.open.zoomBy?.(2) ?? undefined);
  addKey(['-', '_'], '', '', () => panes.a.open.zoomBy?.(0.5) ?? undefined);
  const around = (name, values) => () => choose({ [name]: values[(values.indexOf(chosen()[name]) + 1) % values.length] });
  addKey(['s'], 's', 'scale: linear, log, rank', () => choose({ scale: { linear: 'log', log: 'rank', rank: 'linear' }[settled(chosen()).scale] }));
  addKey(['w'], 'w', 'merge subwords', around('words', [false, true]));
  addKey(['p'], 'p', 'play the steps', togglePlay);
  addKey(['['], '[ ]', 'previous, next step', () => stepBy(-1));
  addKey([']'], '', '', () => stepBy(1));
  addKey(['/'], '/', 'type a text', () => { place('text')?.focus(); place('text')?.select(); });
  addKey(['c'], 'c', 'compare', () => { if (comparable) toggleCompare(); });
  addKey(['e'], 'e', 'export', () => { const menu = place('export'); menu.open = !menu.open; menu.querySelector('summary').focus(); });
  addKey(['d'], 'd', 'light or dark theme', flip);
  addKey(['?'], '?', 'this list', toggleHelp);
  addKey(['Escape'], 'Esc', 'close, clear selection, all steps', () => {
    const state = chosen();
    if (state.cell) choose({ cell: null });
    else if (state.rows.length || state.cols.length) choose({ rows: [], cols: [] });
    else if (state.step !== null) choose({ step: null });
    else return false;
    return true;
  });
}

function stepBy(way) {
  if (!run.steps?.length) return;
  const { step } = chosen();
  choose({ step: step === null ? (way > 0 ? 0 : run.steps.length - 1) : Math.min(run.steps.length - 1, Math.max(0, step + way)) });
}

// ── start ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────

dress(chosen().theme);
onSystemTheme(() => showAll(chosen()));
buildTools();
buildTabs();
buildDisplay();
place('prompt').append(prompts.a.host);
onChoice((state, before) => {
  if (state.theme !== before.theme) dress(state.theme);
  if (!same(state, before, ['model2', 'text2']) || (compares(state) && !same(state, before, ['model', 'text']))) openOther(state);
  if (!same(state, before, ['model', 'text', 'target'])) openRun(state);
  else showAll(state, before);
});
const request = chosen();
if ((request.text !== null && request.text !== first.run.text) || (request.model !== null && request.model !== first.run.model) || request.target) {
  prompts.a.show(first.run, request);
  openRun(request);
} else setRun(first.run);
if (compares(request)) openOther(request);

let resizing;
window.addEventListener('resize', () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => showAll(chosen()), 60);
});
