//! Pictures and files of weights, from outside: drawings match the weights, whatever the labels contain.

mod data;
mod example;
mod print;
mod terminal;
