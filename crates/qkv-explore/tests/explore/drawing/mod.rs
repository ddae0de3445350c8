//! Pictures and files of weights, from outside: what is drawn is what the weights say, whatever the labels hold.

mod data;
mod example;
mod print;
mod terminal;
