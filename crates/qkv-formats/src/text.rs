//! Text for models: parallel corpora, sentence splitting, tokenizers, and batches by length.

pub mod batches;
pub mod corpus;
pub mod sentences;
pub mod tokenizer;
