// Where runs and weights come from: the server (served.js) or the page itself (embedded.js). Both have the same
// interface; `run.can` lists what a source supports.

import { embedded } from 'qkv/embedded';
import { served } from 'qkv/served';

/** The data in index.html: enough for the first paint. */
export const first = JSON.parse(document.getElementById('qkv-first').textContent);

export const source = first.standalone ? embedded(first) : served();

/** A small LRU cache. Values are promises or their results. */
export class Memory {
  constructor(room) {
    this.room = room;
    this.kept = new Map();
  }

  get(key) {
    const value = this.kept.get(key);
    if (value !== undefined) {
      this.kept.delete(key);
      this.kept.set(key, value);
    }
    return value;
  }

  set(key, value) {
    this.kept.delete(key);
    this.kept.set(key, value);
    for (const old of this.kept.keys()) {
      if (this.kept.size <= this.room) break;
      this.kept.delete(old);
    }
    return value;
  }

  /** The cached value, or the one from `make`; a rejected promise is dropped. */
  async ask(key, make) {
    const known = this.get(key);
    if (known !== undefined) return known;
    const promise = make();
    this.set(key, promise);
    try {
      return this.set(key, await promise);
    } catch (error) {
      if (this.kept.get(key) === promise) this.kept.delete(key);
      throw error;
    }
  }

  /** The cached value if it has arrived. */
  held(key) {
    const value = this.get(key);
    return value instanceof Promise ? undefined : value;
  }
}

const matrices = new Memory(96);
const answers = new Memory(64);
const runs = new Memory(8); // fewer than the server keeps

/** All weights of a head, f32 [n, m]; of head "mean", the mean of all heads. */
export function weightsOf(run, layer, head) {
  const { n, m, heads } = run.layers[layer];
  return matrices.ask(`${run.id}/${layer}/${head}`, async () => {
    if (head !== 'mean') return source.weights(run, layer, head, [0, n], [0, m]);
    const all = await Promise.all(Array.from({ length: heads }, (_, one) => weightsOf(run, layer, one)));
    return all[0].map((_, i) => all.reduce((sum, weights) => sum + weights[i], 0) / heads);
  });
}

/** The same, if it is loaded. */
export const heldWeights = (run, layer, head) => matrices.held(`${run.id}/${layer}/${head}`);

/** A rectangle of the weights of a head. */
export const part = (run, layer, head, rows, cols) =>
  answers.ask(`part/${run.id}/${layer}/${head}/${rows}/${cols}`, () => source.weights(run, layer, head, rows, cols));

/** A run by its request; equal requests are sent once. */
export const ask = (model, text, target) => runs.ask(`run/${model}/${text}/${target ?? ''}`, () => source.ask(model, text, target));

/** The thumbnails of all heads: { values: f32 [heads, size, size], sampled }. */
export const gridOf = (run, size, pool) => answers.ask(`grid/${run.id}/${size}/${pool}`, () => source.grid(run, size, pool));

/** The measures of all heads. */
export const headsOf = (run) => answers.ask(`heads/${run.id}`, () => source.heads(run));

/** The derivation of a weight. */
export const pairOf = (run, layer, head, query, key) =>
  answers.ask(`pair/${run.id}/${layer}/${head}/${query}/${key}`, () => source.pair(run, layer, head, query, key));

/** Attention through the first `depth` layers of a group, f32 [rows, m]. */
export const rolloutOf = (run, group, depth, rows) =>
  answers.ask(`rollout/${run.id}/${group}/${depth}/${rows}`, () => source.rollout(run, group, depth, rows));

const page = 256;

/** The tokens from…to of a side. Long sides are loaded in pages. */
export async function tokensOf(run, side, from, to) {
  const { tokens, count } = run.sides[side];
  if (tokens) return tokens.slice(from, to);
  const pages = [];
  for (let start = Math.floor(from / page) * page; start < to; start += page) {
    pages.push(answers.ask(`tokens/${run.id}/${side}/${start}`, () => source.tokens(run, side, start, Math.min(count, start + page))));
  }
  const start = Math.floor(from / page) * page;
  return (await Promise.all(pages)).flat().slice(from - start, to - start);
}
