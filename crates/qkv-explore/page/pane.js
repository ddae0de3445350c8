// One picture with its run: the open view, the busy state, errors and the legend. There are two panes when runs are
// compared.

import { h } from 'qkv/element';
import { onPoint } from 'qkv/hover';
import { legend } from 'qkv/legend';
import { at } from 'qkv/run';
import { firstView, viewFor } from 'qkv/views';

export class Pane {
  /** `side` is "a" or "b". */
  constructor(host, run, side) {
    Object.assign(this, { run, side, view: null, open: null });
    this.title = h('p', { class: 'pane-title', hidden: true });
    this.body = h('div', { class: 'view' });
    this.strip = h('div', { class: 'legend', hidden: true, 'aria-hidden': 'true' });
    this.fault = h('p', { class: 'refusal', role: 'alert', hidden: true });
    this.element = h('article', { class: 'pane', 'aria-label': side === 'a' ? 'First run' : 'Second run' }, this.title, this.fault, this.body, this.strip);
    host.append(this.element);
    this.stop = onPoint((cell) => this.open?.mark?.(cell));
  }

  /** Shows the state in a suitable view. */
  async show(state) {
    const { layer } = at(this.run, state);
    const view = viewFor(state.view, this.run, layer) ?? viewFor(firstView(this.run, layer), this.run, layer);
    if (view !== this.view) {
      this.open?.close();
      this.body.replaceChildren();
      this.body.dataset.view = view.tab;
      this.legend(null);
      this.view = view;
      this.open = view.open(this.body, this);
    }
    const { open } = this;
    this.fault.hidden = true;
    try {
      await open.show(state);
    } catch (error) {
      if (open === this.open) this.refuse(error);
    }
  }

  /** The caption above the picture in a comparison. */
  name(text) {
    this.title.hidden = !text;
    this.title.textContent = text ?? '';
  }

  /** Dims the old picture while the new one is loading. */
  busy(waits) {
    clearTimeout(this.waiting);
    if (waits) this.waiting = setTimeout(() => this.element.classList.add('busy'), 120);
    else this.element.classList.remove('busy');
  }

  refuse(error) {
    this.busy(false);
    this.fault.hidden = false;
    this.fault.textContent = error.hint ? `${error.message}: ${error.hint}` : error.message;
  }

  /** Sets the legend; null hides it. */
  legend(scale, palette) {
    this.strip.hidden = !scale;
    if (scale) legend(this.strip, scale, palette);
  }

  close() {
    this.stop();
    this.open?.close();
    clearTimeout(this.waiting);
    this.element.remove();
  }
}
