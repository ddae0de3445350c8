//! The program as a user types it: whole commands, in a folder, on files. One binary, so that the libraries are linked
//! once.
//!
//! | module | tests |
//! | --- | --- |
//! | `run` | `qkv run`: options, tensors, files, reports |
//! | `models` | training, translation, generation and the other commands about models, on models that train in seconds |
//! | `bench` | `qkv bench`, on tiny shapes for tiny times |
//! | `explore` | `qkv explore`, in a real browser |
//! | `hostile` | attacks: endless inputs, damaged models, kills |

mod bench;
mod explore;
mod hostile;
mod models;
mod run;
