// The input line and the output of the model. A second one requests the run to compare with.

import { fill, h } from 'qkv/element';
import { first } from 'qkv/source';
import { chosen, choose } from 'qkv/state';

const models = first.models ?? [];
const model = (id) => models.find((one) => one.id === id);

/** The choices: models, and the recording that the program was started with. */
const offered = first.run.model === null && models.length ? [{ id: null, name: 'the recording' }, ...models] : models;

/** The model selector, if there are several. */
function chooser(run, pick) {
  if (offered.length < 2) return null;
  return h('select', { 'aria-label': 'Model', onchange: (event) => pick(offered[event.target.selectedIndex]) },
    offered.map(({ id, name, note }) => h('option', { selected: id === run.model, title: note ?? '' }, name)));
}

/** The input of the first run ("a") or of the comparison ("b"). */
export class Prompt {
  constructor(host, side) {
    Object.assign(this, { host, side, giving: false });
  }

  ask(patch) {
    const renamed = this.side === 'a' ? patch : Object.fromEntries(Object.entries(patch).flatMap(([key, value]) => (key === 'target' ? [] : [[`${key}2`, value]])));
    choose({ ...renamed, cell: null, step: null, rows: [], cols: [] }, { push: true });
  }

  show(run, state) {
    if (this.run === run) return;
    this.giving = Boolean(state.target);
    this.build(run, state);
  }

  build(run, state) {
    this.run = run;
    const takes = !first.standalone && (model(run.model)?.takes_text ?? false);
    const words = () => this.input?.value.trim() || run.text || first.examples?.[0] || '';
    const pick = chooser(run, ({ id, takes_text: types }) => this.ask({ model: id, text: id === null ? null : types ? words() : '', target: null }));
    this.input = this.target = null;
    fill(this.host, takes ? this.form(run, state, pick) : h('div', { class: 'ask' }, h('p', { class: 'given' }, run.text || model(run.model)?.name || 'a recording'), pick),
      h('div', { class: 'reply' }, run.output ? h('p', { class: run.output.length > 90 ? 'answer long' : 'answer', id: this.side === 'a' ? 'output' : undefined }, run.output) : null,
        takes && this.side === 'a' ? this.examples(run) : null));
  }

  /** The selector of images or sounds. */
  album(run, names, pick) {
    const go = (event) => this.ask({ model: run.model, text: names[event.target.selectedIndex], target: null });
    return h('div', { class: 'ask' }, h('select', { 'aria-label': run.form?.kind === 'sound' ? 'Sound' : 'Image', id: this.side === 'a' ? 'text' : 'text2', onchange: go },
      names.map((name) => h('option', { selected: name === run.text }, name))), pick);
  }

  form(run, state, pick) {
    const names = model(run.model)?.inputs ?? [];
    if (names.length) return this.album(run, names, pick);
    this.input = h('input', { type: 'text', value: run.text, 'aria-label': this.side === 'a' ? 'Text' : 'Text to compare with', spellcheck: 'false', autocomplete: 'off', placeholder: 'Type a sentence', id: this.side === 'a' ? 'text' : 'text2', enterkeyhint: 'go' });
    if (this.giving) {
      this.target = h('input', { type: 'text', value: state.target ?? run.output ?? '', 'aria-label': 'Output to force', placeholder: 'An output of your own', spellcheck: 'false', autocomplete: 'off' });
    }
    // Enter that ends an IME composition does not submit.
    const compose = (event) => { if (event.key === 'Enter' && event.isComposing) event.preventDefault(); };
    const submit = (event) => {
      event.preventDefault();
      this.ask({ model: run.model, text: this.input.value.trim(), target: this.target?.value.trim() || null });
    };
    return h('form', { class: 'ask', onsubmit: submit, onkeydown: compose }, this.input, pick, h('button', { type: 'submit', class: 'go' }, model(run.model).verb),
      this.target && this.side === 'a' ? h('div', { class: 'target' }, this.target) : null);
  }

  examples(run) {
    const give = () => {
      this.giving = !this.giving;
      if (this.giving || !chosen().target) this.build(run, { target: chosen().target ?? run.output }); else this.ask({ target: null });
      this.target?.focus();
    };
    if (['image', 'sound'].includes(run.form?.kind)) return null;
    const others = (first.examples ?? []).filter((text) => text !== run.text).slice(0, 4);
    return h('p', { class: 'examples' },
      others.length ? h('span', { class: 'quiet' }, 'try ') : null,
      others.map((text) => h('button', { type: 'button', class: 'link', title: text, onclick: () => this.ask({ model: run.model, text, target: null }) }, text.length > 60 ? `${text.slice(0, 60)}…` : text)),
      run.output && model(run.model).takes_target ? h('button', { type: 'button', class: 'link quiet', 'aria-pressed': String(this.giving), onclick: give, title: 'see what the model attends to when it is made to write this' }, this.giving ? 'generate the output' : 'set the output') : null);
  }

  /** Shows whether a run is pending, and removes an earlier error. */
  waits(on) {
    this.host.classList.toggle('busy', on);
    this.host.querySelector('.refusal')?.remove();
  }

  refuse(error) {
    this.waits(false);
    this.host.append(h('p', { class: 'refusal', role: 'alert' }, error.hint ? `${error.message}: ${error.hint}` : error.message));
  }
}
