// The document view: sentences below each other with their weights, words shaded by the excess of their weight over a
// uniform one: on its own, or times √s of the sentence (Yang et al. 2016), so that strong words of strong sentences
// stand out.

import { h } from 'qkv/element';
import { weight } from 'qkv/number';
import { css, palette } from 'qkv/palette';
import { written } from 'qkv/run';
import { say } from 'qkv/say';
import { scale } from 'qkv/scale';
import { part } from 'qkv/source';
import { choose } from 'qkv/state';
import { theme } from 'qkv/theme';

const ways = [['both', 'with their sentence', 'how far above an even share, times √s: strong words of strong sentences'], ['words', 'within their sentence', 'how far above an even share of the sentence']];

/** A legible text color for a background. */
const ink = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue > 140 ? '#14161d' : '#f4f6fa');

/** The words of a sentence with subwords merged: { text, from, to } in tokens. */
function wordsOf(tokens, from, to) {
  const words = [];
  for (let at = from; at < to; at++) {
    const last = words.at(-1);
    if (last && tokens[at].word !== null && tokens[at].word === tokens[last.from].word) {
      last.text += written(tokens[at]);
      last.to = at + 1;
    } else words.push({ text: written(tokens[at]), from: at, to: at + 1 });
  }
  return words;
}

function open(host, pane) {
  const { run } = pane;
  const { form } = run;
  const body = h('div', { class: 'document', role: 'list', 'aria-label': 'The document, shaded by attention' });
  const how = h('span', { class: 'segments', role: 'group', 'aria-label': 'Shading of words' });
  const status = h('p', { class: 'quiet status', 'aria-hidden': 'true' });
  host.append(h('div', { class: 'knobs' }, h('span', {}, 'words ', how), status), body);
  const note = h('p', { class: 'quiet note' }, 'The bar beside a sentence is its share of the document; over all sentences they sum to 1, as the words of a sentence do. Words are shaded by how far their weight lies above uniform.');
  pane.element.append(note);
  let [shares, words, shown, lines] = [null, null, null, null];

  async function fetchAll() {
    const [sentences, all] = [run.layers[form.sentences], run.layers[form.words]];
    shares = await part(run, form.sentences, 0, [0, 1], [0, sentences.m]);
    words = await part(run, form.words, 0, [0, all.n], [0, all.m]);
    const { tokens } = run.sides[all.keys];
    let from = 0;
    lines = form.lengths.map((length, s) => {
      const found = wordsOf(tokens, from, from + length).map((word) => {
        let sum = 0;
        for (let at = word.from; at < word.to; at++) sum += words[s * all.m + at];
        return { ...word, weight: sum };
      });
      from += length;
      return { share: shares[s], words: found };
    });
  }

  /** The tooltip of a word and its sentence. */
  function tell(line, word) {
    const of = `sentence ${weight(line.share)} of the document`;
    status.textContent = word ? `${word.text} ${weight(word.weight)} of its sentence · ${of}` : of;
    return status.textContent;
  }

  function draw(state) {
    const shades = palette(state.palette, theme());
    const above = (share, of) => Math.max(0, share - 1 / of);
    const strength = (line, word) => above(word.weight, line.words.length) * (state.shade === 'words' ? 1 : Math.sqrt(Math.max(0, line.share)));
    const measure = scale(state.scale, Float32Array.from(lines.flatMap((line) => line.words.map((word) => strength(line, word)))));
    const ofShares = scale(state.scale, Float32Array.from(lines.map(({ share }) => share)));
    how.replaceChildren(...ways.map(([id, name, title]) => h('button', { type: 'button', title, 'data-shade': id, 'aria-pressed': String(state.shade === id), onclick: () => choose({ shade: id }) }, name)));
    body.replaceChildren(...lines.map((line, s) => {
      const share = h('span', { class: 'share', title: `${weight(line.share)} of the document` });
      share.style.setProperty('--share', `${(100 * ofShares.at(line.share)).toFixed(1)}%`);
      share.style.setProperty('--shade', css(shades(Math.max(0.35, ofShares.at(line.share)))));
      const text = line.words.flatMap((word) => {
        const color = shades(measure.at(strength(line, word)));
        const button = h('button', { type: 'button', class: 'word', tabIndex: -1, 'data-weight': word.weight, 'aria-label': `${word.text}, ${weight(word.weight)} of its sentence` }, word.text);
        button.style.background = css(color);
        button.style.color = ink(color);
        button.addEventListener('pointerenter', () => tell(line, word));
        button.addEventListener('focus', () => say(tell(line, word)));
        button.addEventListener('click', () => { if (run.can.pair) choose({ layer: form.words, head: 0, cell: [s, word.from] }, { push: true }); });
        return [button, ' '];
      });
      const row = h('div', { class: 'sentence', role: 'listitem', 'data-weight': line.share }, share, h('span', { class: 'figure' }, line.share.toFixed(3)), h('span', { class: 'words' }, text));
      row.addEventListener('pointerenter', () => tell(line, null));
      return row;
    }));
    body.querySelector('.word')?.setAttribute('tabindex', '0');
    pane.legend(measure, shades);
  }

  // Roving tabindex: one word is in the tab order, arrows move from there.
  body.addEventListener('keydown', (event) => {
    const all = [...body.querySelectorAll('.word')];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && all[all.indexOf(document.activeElement) + step];
    if (!step || event.shiftKey) return;
    event.preventDefault();
    event.stopPropagation();
    next?.focus();
  });
  body.addEventListener('pointerleave', () => { status.textContent = ''; });

  return {
    async show(state) {
      const request = shown = {};
      if (!lines) {
        pane.busy(true);
        await fetchAll();
        if (request !== shown) return;
        pane.busy(false);
      }
      draw(state);
    },
    numbers: () => lines && {
      rows: lines.map((_, s) => ({ label: run.sides[run.layers[form.sentences].keys].tokens[s].text, members: [s] })),
      cols: [{ label: 'share of the document', members: [0] }],
      values: Float32Array.from(lines.map(({ share }) => share)),
    },
    close() {
      shown = null;
      note.remove();
    },
  };
}

export const documentView = { tab: 'document', name: 'Document', hint: 'sentences and words, shaded', suits: (run) => run.form?.kind === 'document', open };
