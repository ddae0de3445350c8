//! Text on its way to a model and back: pairs of sentences from files, sentences of documents, pieces of words
//! as numbers, and batches of them.

pub mod batches;
pub mod corpus;
pub mod sentences;
pub mod tokenizer;
