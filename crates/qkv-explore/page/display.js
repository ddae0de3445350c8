// The display controls. Each writes to the state; none draws.

import { fill, h, place } from 'qkv/element';
import { percent } from 'qkv/number';
import { names } from 'qkv/palette';
import { at, fits } from 'qkv/run';
import { unpick } from 'qkv/selection';
import { chosen, choose } from 'qkv/state';

const followers = [];

/** A group of buttons, one of them pressed. */
function segments(label, name, options) {
  const buttons = options.map(([value, text, title]) => h('button', { type: 'button', title, onclick: () => choose({ [name]: value }) }, text));
  followers.push((state) => buttons.forEach((button, i) => button.setAttribute('aria-pressed', String(state[name] === options[i][0]))));
  return h('div', { class: 'control' }, h('span', { class: 'control-name' }, label), h('span', { class: 'segments', role: 'group', 'aria-label': label }, buttons));
}

/** A checkbox. `flips`: checked means off. */
function box(label, name, { flips = false, title } = {}) {
  const input = h('input', { type: 'checkbox', onchange: () => choose({ [name]: input.checked !== flips }) });
  followers.push((state) => { input.checked = state[name] !== flips; });
  return h('label', { class: 'box', title }, input, label);
}

/** Fraction of each row's weight that is drawn. */
function massSlider() {
  const said = h('output', {});
  const input = h('input', { type: 'range', min: 0.05, max: 1, step: 0.01, 'aria-label': 'Fraction of each row that is drawn', oninput: () => choose({ mass: Number(input.value) }) });
  followers.push((state) => {
    input.value = state.mass;
    said.textContent = state.mass < 1 ? percent(state.mass) : 'all';
    input.setAttribute('aria-valuetext', said.textContent);
  });
  return h('label', { class: 'control', title: 'draws the fewest largest weights of each row that sum to this fraction' }, h('span', { class: 'control-name' }, 'Per row, draw ', said), input);
}

/** Builds the panel. */
export function buildDisplay() {
  const picked = h('div', { class: 'picked', hidden: true });
  const count = h('span', {});
  picked.append(count, segments('together', 'fold', [['mean', 'mean', 'the mean of the picked tokens'], ['sum', 'sum', 'the sum of the picked tokens']]),
    h('button', { type: 'button', class: 'link', onclick: unpick }, 'clear selection'));
  const pool = segments('Pool', 'pool', [['max', 'max', 'a pixel shows the maximum of the weights it covers'], ['mean', 'mean', 'a pixel shows the mean of the weights it covers']]);
  const tokens = h('fieldset', {}, h('legend', {}, 'Tokens'),
    box('merge subwords', 'words', { title: 'a weight to a word is the sum over its tokens; a word’s row is the mean of its tokens’ rows' }),
    box('hide special tokens', 'special', { flips: true }),
    box('hide the first key (sink)', 'sink', { flips: true, title: 'the first token often takes the weight that a head gives to no other' }),
    box('renormalize rows', 'renormalize', { title: 'what is left of each row is divided by its sum: no longer the weights that the model used' }),
    massSlider());
  const layout = segments('Lines', 'layout', [['auto', 'auto', 'across for Chinese, Japanese and Korean'], ['across', 'across', 'two rows'], ['down', 'down', 'two columns']]);
  followers.push((state, run) => { // only controls that affect the current view
    const long = !fits(at(run, state).layer);
    pool.hidden = !long || !['heatmap', 'grid'].includes(state.view);
    layout.hidden = state.view !== 'lines';
    tokens.hidden = (long && state.view === 'heatmap') || ['grid', 'document', 'image', 'sound'].includes(state.view);
    picked.hidden = (!state.rows.length && !state.cols.length) || ['document', 'image', 'sound'].includes(state.view);
    count.textContent = [state.rows.length ? `${state.rows.length} of the rows` : '', state.cols.length ? `${state.cols.length} of the columns` : ''].filter(Boolean).join(', ');
  });
  const open = window.matchMedia('(min-width: 1180px)').matches;
  fill(place('display'), h('details', { open }, h('summary', {}, 'Display'),
    h('div', { class: 'controls' },
      segments('Scale', 'scale', [['linear', 'linear', 'as it is'], ['log', 'log', 'small weights show beside large ones'], ['rank', 'rank', 'order only']]),
      segments('Colors', 'palette', names.map((name) => [name, name, `the palette “${name}”`])),
      pool,
      layout, tokens, picked)));
}

/** Updates all controls from the state. */
export const showDisplay = (run, state = chosen()) => followers.forEach((follow) => follow(state, run));
