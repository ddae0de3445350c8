// The description of one cell: its two tokens, the exact weight, the sum of the row.

import { h } from 'qkv/element';
import { weight } from 'qkv/number';

/** The tooltip of a cell. */
export function tip({ query, key, value, sum, shown, note }) {
  const less = sum !== undefined && Math.abs(sum - shown) > 5e-5 ? `, of which ${shown.toFixed(4)} is shown` : '';
  return h('div', {},
    h('p', { class: 'tip-pair' }, h('b', {}, query), h('span', { class: 'quiet' }, ' attends to '), h('b', {}, key)),
    h('p', { class: 'tip-weight' }, typeof value === 'string' ? value : weight(value)),
    sum === undefined ? null : h('p', { class: 'quiet' }, `row sums to ${sum.toFixed(4)}${less}`),
    note ? h('p', { class: 'quiet' }, note) : null);
}

/** The same as a sentence for screen readers. */
export const spoken = ({ query, key, value }) => `${query} attends to ${key}, ${weight(value)}`;
