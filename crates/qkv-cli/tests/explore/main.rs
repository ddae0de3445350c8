//! `qkv explore` as a user meets it: the program serves, a real browser opens the page, keys and pointer do the rest. Numbers that
//! the page shows are compared with what the server gives and with what `qkv run --weights` writes.

mod alone;
mod browser;
mod map;
mod page;
mod program;
mod reading;
