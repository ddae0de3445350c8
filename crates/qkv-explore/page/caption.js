// The line above the picture: layer and head, what rows and columns are, and buttons to the next ones.

import { fill, h, place } from 'qkv/element';
import { count } from 'qkv/number';
import { at, groupName, headName, headsIn, layerName, order } from 'qkv/run';
import { say } from 'qkv/say';
import { chosen, choose } from 'qkv/state';

/** Moves by some layers and heads, clamped at the ends. */
export function go(run, layers, heads) {
  const now = at(run, chosen());
  const list = order(run);
  const index = list[Math.min(list.length - 1, Math.max(0, list.indexOf(now.index) + layers))];
  const choice = headsIn(run.layers[index]);
  const place = choice.indexOf(now.head) < 0 ? choice.length - 1 : choice.indexOf(now.head);
  const head = choice[Math.min(choice.length - 1, Math.max(0, place + heads))];
  choose({ layer: index, head });
  say(`${layerName(run.layers[index])}, ${headName(run.layers[index], head)}`);
}

/** Updates the line. */
export function showCaption(run, state) {
  const { layer, head } = at(run, state);
  const step = (symbol, label, layers, heads) => h('button', { type: 'button', class: 'step', 'aria-label': label, title: label, onclick: () => go(run, layers, heads) }, symbol);
  const [queries, keys] = [run.sides[layer.queries].name, run.sides[layer.keys].name];
  const sides = state.view === 'lines' ? `from ${queries} to ${keys}` : layer.queries === layer.keys ? `rows and columns: ${queries}` : `rows: ${queries} · columns: ${keys}`;
  const focused = document.activeElement?.closest?.('#caption') ? document.activeElement.getAttribute('aria-label') : null;
  fill(place('caption'),
    h('h2', { id: 'where' }, groupName(layer.group), h('span', { class: 'spot' }, step('▴', 'previous layer (↑)', -1, 0), `layer ${layer.index}`, step('▾', 'next layer (↓)', 1, 0)),
      h('span', { class: 'spot' }, step('◂', 'previous head (←)', 0, -1), headName(layer, head), step('▸', 'next head (→)', 0, 1))),
    h('p', { class: 'quiet' }, `${sides} · ${count(layer.n)} × ${count(layer.m)} · ${layer.attention}${layer.causal && !layer.attention.includes('causal') ? ' · causal' : ''}`));
  if (focused) place('caption').querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
}
