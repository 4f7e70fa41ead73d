"""The text on which the use of experts is measured: a little of everything that people ask for."""

PROFILE_TEXT = '''\
The harbour was quiet before sunrise. Two fishermen checked their nets, and a woman in a yellow coat
walked along the pier with a thermos under her arm. She had come every morning since the storm to
look at the place where the lighthouse used to stand. "They say it will be rebuilt next spring," one
of the men called out. She nodded, but she did not believe it.

Photosynthesis turns light into chemical energy. In the thylakoid membranes, pigments absorb photons
and pass electrons along a chain of proteins; the gradient of protons that builds up drives the
synthesis of ATP. In the stroma, the Calvin cycle then fixes carbon dioxide into sugars. Plants of
dry places keep their stomata closed by day and store carbon dioxide as malic acid at night.

def longest_common_prefix(words: list[str]) -> str:
    """The longest string that every word begins with."""
    if not words:
        return ""
    shortest = min(words, key=len)
    for index, letter in enumerate(shortest):
        if any(word[index] != letter for word in words):
            return shortest[:index]
    return shortest

for (size_t i = 0; i < count; ++i) {
    const float x = values[i] - mean;
    sum += x * x;
}
return sqrtf(sum / (float)(count > 1 ? count - 1 : 1));

SELECT customers.name, COUNT(*) AS orders, SUM(orders.total) AS spent
FROM customers JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2024-01-01'
GROUP BY customers.name HAVING SUM(orders.total) > 1000 ORDER BY spent DESC LIMIT 10;

{"id": 4711, "type": "invoice", "currency": "EUR", "lines": [{"sku": "A-17", "quantity": 3, "price":
12.5}, {"sku": "B-02", "quantity": 1, "price": 240.0}], "paid": false, "notes": null}

Question: A train leaves at 9:40 and travels 210 km at an average of 84 km/h. When does it arrive?
Answer: 210 / 84 = 2.5 hours, so it arrives two and a half hours later, at 12:10.

Let f(x) = x^3 - 6x^2 + 9x + 1. Then f'(x) = 3x^2 - 12x + 9 = 3(x - 1)(x - 3), so the function has a
local maximum f(1) = 5 and a local minimum f(3) = 1. By induction, 1 + 3 + 5 + ... + (2n - 1) = n^2:
adding the next odd number 2n + 1 to n^2 gives (n + 1)^2.

Dear Ms. Alvarez, thank you for your message of 12 March. We are sorry that your parcel arrived late
and that the box was damaged. Please find attached a return label; a replacement will leave our
warehouse tomorrow. If there is anything else we can do, simply reply to this e-mail. Kind regards,
the support team.

The parties agree that this contract is governed by the laws of the State of New York. Neither party
shall be liable for delays caused by events beyond its reasonable control, including fire, flood,
strike or acts of government, provided that notice is given within ten days.

Aspirin inhibits cyclo-oxygenase irreversibly and so reduces the formation of thromboxane in
platelets. Common side effects are heartburn and bleeding; children with a fever should not take it.

Die Bundesrepublik besteht aus sechzehn Ländern. Im Herbst färben sich die Wälder des Mittelgebirges
rot und gelb, und in den Weinorten an Mosel und Rhein wird gefeiert. Wer früh aufsteht, sieht den
Nebel über dem Fluss.

La bibliothèque municipale ouvre à neuf heures. On y trouve des romans, des journaux et une salle de
lecture pour les enfants ; le samedi, un conteur raconte des histoires de la mer.

El tren llegó con retraso y la estación estaba vacía. Sin embargo, María esperó en el andén, porque
le había prometido a su abuela que no se iría sin ella.

Вчера вечером мы долго говорили о книге, которую она только что прочитала. Он слушал молча и смотрел
в окно, где медленно падал снег.

今天的天气很好，我们打算去公园散步。孩子们带着风筝，老人坐在树下下棋。机器学习模型从数据中学习规律，
然后对新的例子作出预测。

昨日の会議では、新しい製品の発売日について話し合いました。来月の初めに決まる予定です。

오늘 아침에는 비가 왔지만 오후에는 날씨가 맑아졌다. 우리는 강가를 따라 오래 걸었다.

# Installing
1. Download the archive for your system and check its signature.
2. Unpack it: `tar xf tool-2.1.tar.gz && cd tool-2.1`.
3. Run `make install PREFIX=$HOME/.local`, then add `$HOME/.local/bin` to your PATH.

| Country | Capital | Population (millions) |
| --- | --- | ---: |
| Japan | Tokyo | 124.5 |
| Kenya | Nairobi | 55.1 |
| Peru | Lima | 34.4 |

User: Can you summarise the meeting in three bullet points?
Assistant: Of course:
- The release moves to the second week of June, because two security fixes are still in review.
- Anna writes the migration guide; Tom asks the three largest customers for feedback.
- The budget for the new test machines was approved, with delivery in about four weeks.

User: Which of these is a mammal: trout, dolphin, penguin or gecko?
Assistant: The dolphin. It breathes air, is warm-blooded and feeds its young with milk.

Once upon a time a tailor lived in a town with seven gates. He sewed coats that never wore out,
and so his customers, one after the other, stopped coming. "I am of no use," he told his cat.
The cat yawned. "Then sew something that must wear out," it said, "sew shoes for dancers."

Rome was not built in a day, but the aqueducts were built to last: eleven of them brought a million
cubic metres of water to the city every day, over arches and through tunnels that were surveyed
with little more than a plumb line, a level and patience. In 1492 three ships left Palos; in 1969
two people walked on the Moon; in between, the printing press, the steam engine and the transistor
each changed how far a thought could travel.
'''  # noqa: RUF001  other scripts are meant
