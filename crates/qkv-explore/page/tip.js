// Owns what is said of one cell: its two tokens, the exact weight, what the row sums to.

import { h } from 'qkv/element';
import { weight } from 'qkv/number';

/** The sentence about a cell, for a reader of the picture. */
export function tip({ query, key, value, sum, shown, note }) {
  const less = sum !== undefined && Math.abs(sum - shown) > 5e-5 ? `, shown of it ${shown.toFixed(4)}` : '';
  return h('div', {},
    h('p', { class: 'tip-pair' }, h('b', {}, query), h('span', { class: 'quiet' }, ' looks at '), h('b', {}, key)),
    h('p', { class: 'tip-weight' }, typeof value === 'string' ? value : weight(value)),
    sum === undefined ? null : h('p', { class: 'quiet' }, `row sums to ${sum.toFixed(4)}${less}`),
    note ? h('p', { class: 'quiet' }, note) : null);
}

/** The same for a listener. */
export const spoken = ({ query, key, value }) => `${query} looks at ${key}, ${weight(value)}`;
