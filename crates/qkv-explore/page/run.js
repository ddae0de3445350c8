// Owns what can be said of a run without its weights: which layers and heads there are, in which order, what they and their tokens are
// called, and which of them a newcomer should see first.

/** Above this many tokens on a side a matrix is shown as a map. */
export const small = 384;

/** Whether a layer's matrix is small enough to be fetched whole. */
export const fits = ({ n, m }) => n <= small && m <= small;

/** Layers in the order of the groups: as the grid stacks them, and as the arrow keys walk. */
export const order = (run) => run.groups.flatMap((group) => group.layers);

/** The heads of a layer: their numbers, then "mean" where it can be shown. */
export function headsIn(layer) {
  const heads = Array.from({ length: layer.heads }, (_, head) => head);
  return layer.heads > 1 && fits(layer) ? [...heads, 'mean'] : heads;
}

/** The layer to begin with: the last but one that looks from output to input, which aligns best; else the first. */
export function firstLayer(run) {
  const cross = run.groups.find((group) => group.name === 'cross');
  const layers = cross?.layers.length ? cross.layers : order(run);
  return cross?.layers.length ? layers[Math.max(0, layers.length - 2)] : layers[0];
}

/** The layer and head that are chosen, made to fit this run. */
export function at(run, state) {
  const index = state.layer !== null && state.layer < run.layers.length ? state.layer : firstLayer(run);
  const layer = run.layers[index];
  const heads = headsIn(layer);
  let head = state.head;
  if (head === null) head = layer.group === 'cross' && heads.includes('mean') ? 'mean' : 0;
  if (!heads.includes(head)) head = head === 'mean' ? 0 : layer.heads - 1;
  return { index, layer, head };
}

/** "cross-attention, layer 1" */
export const layerName = (layer) => `${groupName(layer.group)}, layer ${layer.index}`;

/** "head 3", "mean of 4 heads" */
export const headName = (layer, head) => (head === 'mean' ? `mean of ${layer.heads} heads` : `head ${head}`);

/** What a group of layers is called. */
export const groupName = (group) => ({ encoder: 'encoder', decoder: 'decoder', cross: 'cross-attention', layers: 'attention', words: 'sentences to words', sentences: 'document to sentences' })[group] ?? group;

const marks = /^[▁Ġ]|^##/u;

/** A token as a reader knows it: no marks of the tokenizer, spaces and line ends made visible. */
export function written(token) {
  const text = token.text.replace(marks, '').replaceAll('\n', '⏎').replaceAll('\t', '⇥');
  return text.trim() === '' ? (text === '' ? '␣' : text.replaceAll(' ', '␣')) : text.replace(/^ /, '');
}

/** Whether most of these tokens are Chinese, Japanese or Korean: such text reads best across. */
export function wide(tokens) {
  const plain = tokens.filter((token) => !token.special);
  const cjk = plain.filter((token) => /[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]/u.test(token.text));
  return plain.length > 0 && cjk.length * 2 > plain.length;
}

/** Whether the rows of a layer are the steps of writing. */
export const stepwise = (run, layer) => run.steps !== null && run.steps !== undefined && layer.group !== 'encoder' && layer.n === run.steps.length;
