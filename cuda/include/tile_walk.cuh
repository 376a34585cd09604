// The order in which the tiles of a product are taken: a band of tiles of tokens is gone through together, all of them for
// some rows of the weight, then for the next rows, so that L2 keeps their x and each weight is read once a band.
#pragma once

constexpr int kBand = 8;

struct TilePlace {
  int token_tile, row_tile;
};

__device__ __forceinline__ TilePlace tile_at(int number, int token_tiles, int row_tiles, int longest_band = kBand) {
  const int first = number / (longest_band * row_tiles) * longest_band, band = min(longest_band, token_tiles - first);
  const int rest = number - first * row_tiles;
  return {first + rest % band, rest / band};
}
