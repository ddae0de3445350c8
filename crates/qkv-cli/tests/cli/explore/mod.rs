//! `qkv explore`: the program serves, a real browser opens the page, keys and pointer do the rest. Numbers on the page
//! are compared with those of the server and of `qkv run --weights`.

mod alone;
mod browser;
mod map;
mod page;
mod program;
mod reading;
