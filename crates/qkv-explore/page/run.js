// A run besides its weights: layers, heads, their order and names, tokens, and the defaults to show first.

/** Maximum tokens per side of a heatmap; longer inputs are shown as a map. */
export const small = 384;

/** Whether the matrix of a layer is small enough to be fetched whole. */
export const fits = ({ n, m }) => n <= small && m <= small;

/** Layers in the order of the groups, as in the overview and for arrow keys. */
export const order = (run) => run.groups.flatMap((group) => group.layers);

/** The heads of a layer: indices, then "mean" if it can be shown. */
export function headsIn(layer) {
  const heads = Array.from({ length: layer.heads }, (_, head) => head);
  return layer.heads > 1 && fits(layer) ? [...heads, 'mean'] : heads;
}

/** The default layer: the second to last cross-attention, which aligns best; else the first. */
export function firstLayer(run) {
  const cross = run.groups.find((group) => group.name === 'cross');
  const layers = cross?.layers.length ? cross.layers : order(run);
  return cross?.layers.length ? layers[Math.max(0, layers.length - 2)] : layers[0];
}

/** The chosen layer and head, clamped to this run. */
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

/** The name of a group of layers. */
export const groupName = (group) => ({ encoder: 'encoder', decoder: 'decoder', cross: 'cross-attention', layers: 'attention', words: 'sentences to words', sentences: 'document to sentences' })[group] ?? group;

const marks = /^[▁Ġ]|^##/u;

/** The readable form of a token: no tokenizer marks, visible whitespace. */
export function written(token) {
  const text = token.text.replace(marks, '').replaceAll('\n', '⏎').replaceAll('\t', '⇥');
  return text.trim() === '' ? (text === '' ? '␣' : text.replaceAll(' ', '␣')) : text.replace(/^ /, '');
}

/** Whether most of these tokens are Chinese, Japanese or Korean, which read best horizontally. */
export function wide(tokens) {
  const plain = tokens.filter((token) => !token.special);
  const cjk = plain.filter((token) => /[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]/u.test(token.text));
  return plain.length > 0 && cjk.length * 2 > plain.length;
}

/** Whether the rows of a layer are decoding steps. */
export const stepwise = (run, layer) => run.steps !== null && run.steps !== undefined && layer.group !== 'encoder' && layer.n === run.steps.length;
