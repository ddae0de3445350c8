//! The program as a user types it: whole commands, in a folder, on files. One binary, so that the libraries are linked once.
//!
//! | module | tests |
//! | --- | --- |
//! | `run` | `qkv run`: options, tensors, files, reports |
//! | `models` | training, translation, generation and the other commands about models, on models that train in seconds |
//! | `bench` | `qkv bench`, on tiny shapes for tiny times |
//! | `explore` | `qkv explore`, in a real browser |

mod bench;
mod explore;
mod models;
mod run;
