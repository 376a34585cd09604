// As what numbers travel between ranks.
#pragma once

enum Wire { kPlain, kInt8, kRotated };  // as they are; as int8 in groups; as int8 in rotated groups
